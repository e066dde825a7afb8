"""Responses of /v1/responses, built from the engine's updates: output items, and events about them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from chairlift.core.sampling.params import SamplingParams
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.response_builder import chat_logprobs
from chairlift.server.responses.tools import InputReader
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantParser,
    AssistantPart,
    CallBegun,
    ContentDelta,
    ReasoningDelta,
)

ResponseEvent = dict[str, Any]  # `_encode` adds the sequence number.

_json = msgspec.json.Encoder()


def _item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class MessageItem:
    """An output item with text."""

    id: str = field(default_factory=lambda: _item_id("msg"))
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def body(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def location(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index, "content_index": 0}

    def first_events(self, index: int) -> Iterator[ResponseEvent]:
        yield {"type": "response.content_part.added", **self.location(index), "part": self.part()}

    def last_events(self, index: int) -> Iterator[ResponseEvent]:
        fields = {"text": self.text, "logprobs": self.logprobs}
        yield {"type": "response.output_text.done", **self.location(index), **fields}
        yield {"type": "response.content_part.done", **self.location(index), "part": self.part()}


@dataclass(slots=True)
class ReasoningItem:
    """An output item with reasoning."""

    id: str = field(default_factory=lambda: _item_id("rs"))
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self.pieces)}

    def body(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}

    def location(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index, "content_index": 0}

    def first_events(self, index: int) -> Iterator[ResponseEvent]:
        yield {"type": "response.content_part.added", **self.location(index), "part": self.part()}

    def last_events(self, index: int) -> Iterator[ResponseEvent]:
        yield {"type": "response.reasoning_text.done", **self.location(index), "text": "".join(self.pieces)}
        yield {"type": "response.content_part.done", **self.location(index), "part": self.part()}


@dataclass(slots=True)
class CallItem:
    """An output item with a call of a function, which the client executes."""

    kind: ClassVar[str] = "function_call"
    argument: ClassVar[str] = "arguments"  # the name of its text
    events: ClassVar[str] = "response.function_call_arguments"

    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: _item_id("fc"))
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        call = {"call_id": self.call_id, "name": self.name, self.argument: "".join(self.pieces)}
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"id": self.id, "type": self.kind, "status": self.status, **call, **namespace}

    def location(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index}

    def first_events(self, index: int) -> Iterator[ResponseEvent]:
        return iter(())

    def argument_events(self, index: int, text: str) -> Iterator[ResponseEvent]:
        """Add text of the arguments' JSON."""
        if text:
            self.pieces.append(text)
            yield {"type": f"{self.events}.delta", **self.location(index), "delta": text}

    def last_events(self, index: int) -> Iterator[ResponseEvent]:
        fields = {"name": self.name, self.argument: "".join(self.pieces)}
        yield {"type": f"{self.events}.done", **self.location(index), **fields}


@dataclass(slots=True)
class CustomCallItem(CallItem):
    """An output item with a call of a custom tool, whose input is a text."""

    kind: ClassVar[str] = "custom_tool_call"
    argument: ClassVar[str] = "input"
    events: ClassVar[str] = "response.custom_tool_call_input"

    id: str = field(default_factory=lambda: _item_id("ctc"))
    reader: InputReader = field(default_factory=InputReader)

    def argument_events(self, index: int, text: str) -> Iterator[ResponseEvent]:
        return CallItem.argument_events(self, index, self.reader.push(text))

    def last_events(self, index: int) -> Iterator[ResponseEvent]:
        yield from CallItem.argument_events(self, index, self.reader.close())
        yield from CallItem.last_events(self, index)


OutputItem = MessageItem | ReasoningItem | CallItem


class ResponseObjectBuilder:
    """Builds one response. A whole response is built from the events of a stream, which are discarded."""

    def __init__(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        model: ServedModel,
        parser: AssistantParser,
        response_id: str,
        usage: Usage,
    ) -> None:
        self.usage = usage
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model.name}
        self._settings = _settings(request, params, model)
        self._tools = request.offered_tools
        self._with_logprobs = request.with_logprobs
        self._tokenizer = model.tokenizer
        self._parser = parser
        self._items: list[OutputItem] = []
        self._pending_logprobs: list[dict[str, Any]] = []  # The parser holds back the text of their tokens.
        self._cut = False  # whether the length limit ended the response
        self._sequence = 0

    def add(self, update: Update) -> None:
        for _ in self._update_events(update):
            pass

    def body(self) -> dict[str, Any]:
        return self._response("incomplete" if self._cut else "completed")

    def events(self, update: Update) -> list[bytes]:
        first = [] if self._sequence else self._first_events()
        return [self._encode(event) for event in (*first, *self._update_events(update))]

    def end_events(self) -> list[bytes]:
        response = self.body()
        return [self._encode({"type": f"response.{response['status']}", "response": response})]

    def error_events(self, error: APIError) -> list[bytes]:
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        body = error.body["error"]
        fields = {"code": body["code"] or body["type"], "message": body["message"], "param": body["param"]}
        response = self._response("failed") | {"error": {"code": "server_error", "message": body["message"]}}
        events = [{"type": "error", **fields}, {"type": "response.failed", "response": response}]
        return [self._encode(event) for event in (*([] if self._sequence else self._first_events()), *events)]

    # ---- events ---------------------------------------------------------------------------------

    def _first_events(self) -> list[ResponseEvent]:
        response = self._response("in_progress")
        return [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]

    def _update_events(self, update: Update) -> Iterator[ResponseEvent]:
        if self._with_logprobs:
            self._pending_logprobs += chat_logprobs(update.logprobs, self._tokenizer)
        for part in self._parser.push(update.text):
            yield from self._part_events(part)
        if update.finish_reason is not None:
            for part in self._parser.close():
                yield from self._part_events(part)
            yield from self._finish(cut=update.finish_reason == "length")

    def _part_events(self, part: AssistantPart) -> Iterator[ResponseEvent]:
        match part:
            case ReasoningDelta(text=text):
                self._pending_logprobs = []  # only messages have logprobs
                if not self._items or not isinstance(self._items[-1], ReasoningItem):
                    yield from self._begin(ReasoningItem())
                item = self._items[-1]
                item.pieces.append(text)
                yield {"type": "response.reasoning_text.delta", **item.location(len(self._items) - 1), "delta": text}
            case ContentDelta(text=text):
                if not self._items or not isinstance(self._items[-1], MessageItem):
                    yield from self._begin(MessageItem())
                yield from self._add_text(text)
            case CallBegun(call_id=call_id, name=name):
                self._pending_logprobs = []  # calls have no logprobs
                yield from self._begin(self._new_call(call_id, name))
            case ArgumentsDelta(text=text):
                call = self._items[-1]
                assert isinstance(call, CallItem)
                yield from call.argument_events(len(self._items) - 1, text)

    def _new_call(self, call_id: str, shown: str) -> CallItem:
        tool = self._tools.of_call(shown)
        if tool is None:
            return CallItem(call_id, shown)
        return (CustomCallItem if tool.custom else CallItem)(call_id, tool.name, tool.namespace)

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        message, logprobs = self._items[-1], self._pending_logprobs
        assert isinstance(message, MessageItem)
        message.pieces.append(text)
        message.logprobs += logprobs
        self._pending_logprobs = []
        location = message.location(len(self._items) - 1)
        yield {"type": "response.output_text.delta", **location, "delta": text, "logprobs": logprobs}

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self._items.append(item)
        index = len(self._items) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": item.body()}
        yield from item.first_events(index)

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        if not self._items:
            return
        item, index = self._items[-1], len(self._items) - 1
        item.status = status
        yield from item.last_events(index)
        yield {"type": "response.output_item.done", "output_index": index, "item": item.body()}

    def _finish(self, *, cut: bool) -> Iterator[ResponseEvent]:
        self._cut = cut
        if not self._items or (isinstance(self._items[-1], ReasoningItem) and not cut):  # empty output
            yield from self._begin(MessageItem())
        if self._pending_logprobs and isinstance(self._items[-1], MessageItem):
            yield from self._add_text("")  # the EOS token has a logprob but no text
        yield from self._close("incomplete" if cut else "completed")

    # ---- JSON --------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        finished = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.body() for item in self._items],
            "usage": _usage(self.usage) if finished else None,
            **self._settings,
        }

    def _encode(self, event: ResponseEvent) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _json.encode(numbered))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # Every computed block is cached; there are no separate cache writes.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _settings(request: ResponsesRequest, params: SamplingParams, model: ServedModel) -> dict[str, Any]:
    """Return the request's settings, with defaults, for the response."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    verbosity = request.verbosity if "verbosity" in model.tokenizer.template_reads else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": given(request.top_logprobs, 0),
        "text": {"format": request.text_format, "verbosity": given(verbosity, "medium")},
        "tools": request.offered_tools.echo,
        "tool_choice": given(request.tool_choice, "auto"),
        "parallel_tool_calls": given(request.parallel_tool_calls, True),
        "reasoning": {"effort": request.effort, "summary": None},
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "max_tool_calls": request.max_tool_calls,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": given(request.truncation, "disabled"),
        "service_tier": "default",
    }
