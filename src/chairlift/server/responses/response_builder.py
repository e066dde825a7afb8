"""The engine's updates in the words of /v1/responses: items, and events that tell how they come about."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chairlift.server.http.errors import APIError
from chairlift.server.openai.logprobs import chat_logprobs
from chairlift.server.openai.response_builder import Usage, json_encoder
from chairlift.server.process.messages import Update
from chairlift.server.responses.types import ResponsesRequest
from chairlift.text.assistant_parts import ArgumentsDelta, AssistantParser, AssistantPart, CallBegun, ContentDelta
from chairlift.text.tokenizer import Tokenizer

Event = dict[str, Any]  # by its type; the sequence number is added when it is sent


def _item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class MessageItem:
    """Words for the user."""

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

    def where(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index, "content_index": 0}

    def first_events(self, index: int) -> Iterator[Event]:
        yield {"type": "response.content_part.added", **self.where(index), "part": self.part()}

    def last_events(self, index: int) -> Iterator[Event]:
        told = {"text": self.text, "logprobs": self.logprobs}
        yield {"type": "response.output_text.done", **self.where(index), **told}
        yield {"type": "response.content_part.done", **self.where(index), "part": self.part()}


@dataclass(slots=True)
class CallItem:
    """A call of a tool, for the client to carry out."""

    call_id: str
    name: str
    id: str = field(default_factory=lambda: _item_id("fc"))
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        call = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.pieces)}
        return {"id": self.id, "type": "function_call", "status": self.status, **call}

    def where(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index}

    def first_events(self, index: int) -> Iterator[Event]:
        return iter(())

    def last_events(self, index: int) -> Iterator[Event]:
        told = {"name": self.name, "arguments": "".join(self.pieces)}
        yield {"type": "response.function_call_arguments.done", **self.where(index), **told}


class ResponseObjectBuilder:
    """One response. A whole answer goes through the same events as a stream, only nobody is told of them."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: Tokenizer,
        parser: AssistantParser,
        answer_id: str,
        ids: list[str],
        usage: Usage,
    ) -> None:
        assert len(ids) == 1  # nothing in a request to this endpoint asks for more
        self.usage = usage
        self._head = {"id": answer_id, "object": "response", "created_at": int(time.time()), "model": model}
        self._settings = _settings(request)
        self._with_logprobs = request.with_logprobs
        self._tokenizer = tokenizer
        self._parser = parser
        self._items: list[MessageItem | CallItem] = []
        self._unspoken: list[dict[str, Any]] = []  # logprobs of tokens whose text is still held back
        self._cut = False  # whether the answer ended because it became too long
        self._sequence = 0

    def keep(self, update: Update) -> None:
        for _ in self._happenings(update):
            pass

    def body(self) -> dict[str, Any]:
        return self._response("incomplete" if self._cut else "completed")

    def events(self, update: Update) -> list[bytes]:
        opening = [] if self._sequence else self._opening()
        return [self._told(event) for event in (*opening, *self._happenings(update))]

    def ending(self) -> list[bytes]:
        response = self.body()
        return [self._told({"type": f"response.{response['status']}", "response": response})]

    def failure(self, error: APIError) -> list[bytes]:
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        said = error.body["error"]
        told = {"code": said["code"] or said["type"], "message": said["message"], "param": said["param"]}
        response = self._response("failed") | {"error": {"code": "server_error", "message": said["message"]}}
        events = [{"type": "error", **told}, {"type": "response.failed", "response": response}]
        return [self._told(event) for event in (*([] if self._sequence else self._opening()), *events)]

    # ---- what happens, as events ---------------------------------------------------------------------------------

    def _opening(self) -> list[Event]:
        response = self._response("in_progress")
        return [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]

    def _happenings(self, update: Update) -> Iterator[Event]:
        if self._with_logprobs:
            self._unspoken += chat_logprobs(update.logprobs, self._tokenizer)
        for part in self._parser.push(update.text):
            yield from self._say(part)
        if update.finish_reason is not None:
            for part in self._parser.close():
                yield from self._say(part)
            yield from self._finish(cut=update.finish_reason == "length")

    def _say(self, part: AssistantPart) -> Iterator[Event]:
        match part:
            case ContentDelta(text=text):
                if not self._items or not isinstance(self._items[-1], MessageItem):
                    yield from self._begin(MessageItem())
                yield from self._speak(text)
            case CallBegun(call_id=call_id, name=name):
                self._unspoken = []  # a call has no logprobs to go with
                yield from self._begin(CallItem(call_id, name))
            case ArgumentsDelta(text=text):
                item = self._items[-1]
                item.pieces.append(text)
                where = item.where(len(self._items) - 1)
                yield {"type": "response.function_call_arguments.delta", **where, "delta": text}

    def _speak(self, text: str) -> Iterator[Event]:
        message, logprobs = self._items[-1], self._unspoken
        assert isinstance(message, MessageItem)
        message.pieces.append(text)
        message.logprobs += logprobs
        self._unspoken = []
        where = message.where(len(self._items) - 1)
        yield {"type": "response.output_text.delta", **where, "delta": text, "logprobs": logprobs}

    def _begin(self, item: MessageItem | CallItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._items.append(item)
        index = len(self._items) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": item.body()}
        yield from item.first_events(index)

    def _close(self, status: str) -> Iterator[Event]:
        if not self._items:
            return
        item, index = self._items[-1], len(self._items) - 1
        item.status = status
        yield from item.last_events(index)
        yield {"type": "response.output_item.done", "output_index": index, "item": item.body()}

    def _finish(self, *, cut: bool) -> Iterator[Event]:
        self._cut = cut
        if not self._items:  # a model with nothing to say has said nothing, in a message
            yield from self._begin(MessageItem())
        if self._unspoken and isinstance(self._items[-1], MessageItem):
            yield from self._speak("")  # the token that ended the answer has no text, but a logprob
        yield from self._close("incomplete" if cut else "completed")

    # ---- shapes --------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        over = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.body() for item in self._items],
            "usage": _usage(self.usage) if over else None,
            **self._settings,
        }

    def _told(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_encoder.encode(numbered))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # Whatever is computed may be found by later requests; there is no separate act of writing to count.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _settings(request: ResponsesRequest) -> dict[str, Any]:
    """The request as it was understood, told back with the answer."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": given(request.temperature, 1.0),
        "top_p": given(request.top_p, 1.0),
        "top_logprobs": given(request.top_logprobs, 0),
        "text": {"format": request.text_format, "verbosity": "medium"},
        "tools": [{"strict": None, "description": None, **tool} for tool in request.tools or []],
        "tool_choice": given(request.tool_choice, "auto"),
        "parallel_tool_calls": given(request.parallel_tool_calls, True),
        "reasoning": {"effort": None, "summary": None},
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
    }
