"""POST /v1/responses: a chat completion with another body and another response."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, Tokenized, renamed_parameter
from chairlift.server.generation.reply import Event, PartsBuilder
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatGeneration, ChatPrompt
from chairlift.server.openai.response_builder import chat_logprobs
from chairlift.server.responses.input import InputMessages, Item
from chairlift.server.responses.tools import InputReader, check_encodable
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.classes import DEFAULT_CLASS
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.server.wire.unknown_fields import say_ignored
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantParser,
    AssistantPart,
    CallBegun,
    ContentDelta,
    PlainParser,
    ReasoningDelta,
)

# Prefixes of chat parameters, and this endpoint's names for them.
_NAMES = {
    r"max_(completion_)?tokens": "max_output_tokens",
    r"logprobs": "top_logprobs",
    r"reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"messages|prompt": "input",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}


Keep = Callable[[dict[str, Any], list[Item]], Awaitable[bool]]
"""Stores a finished response and the items of its input; returns whether there was room for them."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where a response is stored, and what it says about that."""

    keep: Keep | None = None
    store: bool = False
    background: bool = False
    response_id: str = ""  # A background response has it before it is generated.
    created_at: int = 0


NOT_KEPT = Keeping()


class ResponsesGeneration(GenerationRequest):
    id_prefix = "resp_"

    body: ResponsesRequest

    def __init__(self, body: ResponsesRequest, model: ServedModel, keeping: Keeping = NOT_KEPT) -> None:
        body.check()
        self.keeping = keeping
        self._tools = body.offered_tools
        for parameter in self._without_effect(body, model, keeping):
            say_ignored(parameter)
        try:
            chat = body.as_chat(model.tokenizer.template_reads)
            self._chat = ChatGeneration(chat, model, chat.params(model))
        except InvalidParameter as error:
            raise self.rename_error(error) from None
        limit, streams = body.max_output_tokens, bool(body.stream)
        super().__init__(body, model, self._chat.params, limit, streams=streams, prompt_parameter="input")
        self.more_text = body.earlier.size

    @staticmethod
    def _without_effect(body: ResponsesRequest, model: ServedModel, keeping: Keeping) -> Iterator[str]:
        """Yield the documented parameters that have no effect with the values that they have."""
        if body.effort not in (None, "none") and model.reasoning_format is None:
            yield "reasoning.effort"
        if body.verbosity not in (None, "medium") and "verbosity" not in model.tokenizer.template_reads:
            yield "text.verbosity"
        if body.reasoning is not None and body.reasoning.summary in ("concise", "detailed"):
            yield "reasoning.summary"
        if body.stream_options is not None and body.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation"
        if body.context_management:
            yield "context_management"
        if body.store and not keeping.store:
            yield "store"

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompt = self._prompt(max_tokens)

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
            assert len(completion_ids) == 1  # this endpoint has no `n`
            parser = prompt.parser()
            return ResponseObjectBuilder(self.body, self.params, self.model, parser, response_id, usage, self.keeping)

        return Tokenized([prompt.tokens], prompt.params, reply, prompt.reasoning, prompt.images)

    async def finish(self, builder: ResponseBuilder) -> None:
        if self.keeping.keep is not None:
            assert isinstance(builder, ResponseObjectBuilder)
            await builder.keep(self.kept_items)

    def queued(self) -> dict[str, Any]:
        """Return the response before there is any output."""
        response_id, parser = self.keeping.response_id, PlainParser()
        builder = ResponseObjectBuilder(self.body, self.params, self.model, parser, response_id, Usage(), self.keeping)
        return builder.response("queued")

    def read_input(self) -> InputMessages:
        """Read the input, which raises if it is invalid; runs in a thread."""
        _ = self._chat.tools  # validates tools before the input
        self.messages = InputMessages(self.body.input, self.body.instructions, self._tools, self.body.earlier)
        if self.keeping is not NOT_KEPT:
            check_encodable("instructions", self.body.instructions)
            self.kept_items = self.messages.kept_items  # What cannot be kept is refused before it costs anything.
        return self.messages

    def _prompt(self, max_tokens: int) -> ChatPrompt:
        messages = self.read_input()
        if self.body.truncation == "auto":
            prompt = self._prompt_if_fitting(messages, 0, max_tokens)
            if prompt is not None:
                return prompt
            self._shorten(messages, max_tokens)
        try:
            return self._chat.encode(messages.messages, max_tokens)
        except InvalidParameter as error:
            raise error.renamed(messages.location(error.parameter)) from None

    def _shorten(self, messages: InputMessages, max_tokens: int) -> None:
        """Drop as few of the first messages as needed for prompt and output to fit, and as many as possible if
        nothing is enough."""
        cuts = messages.cuts()
        if cuts:
            fits = partial(self._prompt_if_fitting, messages, max_tokens=max_tokens)
            messages.drop_before(cuts[bisect_left(cuts[:-1], True, key=lambda cut: fits(cut) is not None)])

    def _prompt_if_fitting(self, messages: InputMessages, cut: int, max_tokens: int) -> ChatPrompt | None:
        try:
            prompt = self._chat.encode(messages.kept(cut), max_tokens)
        except InvalidParameter as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                return None
            raise error.renamed(messages.location(error.parameter)) from None
        room = max_tokens - (self.body.max_output_tokens or 1)
        return prompt if len(prompt.tokens) <= room else None

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        located = self._tools.rename_error(error)
        return located.renamed(renamed_parameter(located.parameter, _NAMES))


# ---- responses: output items, and events about them ------------------------------------------------------------------


def _item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class TextItem:
    """An output item with text: a message, which may have log-probabilities, or reasoning."""

    is_message: bool
    id: str
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def part_type(self) -> str:
        return "output_text" if self.is_message else "reasoning_text"

    def part(self) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self.logprobs} if self.is_message else {}
        return {"type": self.part_type, "text": "".join(self.pieces), **more}

    def body(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.part()]
        if self.is_message:
            return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}

    def location(self, index: int) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": index, "content_index": 0}

    def first_events(self, index: int) -> Iterator[Event]:
        yield {"type": "response.content_part.added", **self.location(index), "part": self.part()}

    def text_event(self, index: int, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Add text and the log-probabilities of its tokens."""
        self.pieces.append(text)
        self.logprobs += logprobs
        more = {"logprobs": logprobs} if self.is_message else {}
        return {"type": f"response.{self.part_type}.delta", **self.location(index), "delta": text, **more}

    def last_events(self, index: int) -> Iterator[Event]:
        more = {"logprobs": self.logprobs} if self.is_message else {}
        text = "".join(self.pieces)
        yield {"type": f"response.{self.part_type}.done", **self.location(index), "text": text, **more}
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

    def first_events(self, index: int) -> Iterator[Event]:
        return iter(())

    def argument_events(self, index: int, text: str) -> Iterator[Event]:
        """Add text of the arguments' JSON."""
        if text:
            self.pieces.append(text)
            yield {"type": f"{self.events}.delta", **self.location(index), "delta": text}

    def last_events(self, index: int) -> Iterator[Event]:
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

    def argument_events(self, index: int, text: str) -> Iterator[Event]:
        return CallItem.argument_events(self, index, self.reader.push(text))

    def last_events(self, index: int) -> Iterator[Event]:
        yield from CallItem.argument_events(self, index, self.reader.close())
        yield from CallItem.last_events(self, index)


class ResponseObjectBuilder(PartsBuilder):
    """Builds one response of output items."""

    def __init__(
        self,
        request: ResponsesRequest,
        params: SamplingParams,
        model: ServedModel,
        parser: AssistantParser,
        response_id: str,
        usage: Usage,
        keeping: Keeping = NOT_KEPT,
    ) -> None:
        super().__init__(parser, usage)
        created_at, response_id = keeping.created_at or int(time.time()), keeping.response_id or response_id
        self._head = {"id": response_id, "object": "response", "created_at": created_at, "model": model.name}
        self._settings = _settings(request, params, model) | {"background": keeping.background, "store": keeping.store}
        self._keep = keeping.keep
        self._kept: dict[str, Any] | None = None
        self._tools = request.offered_tools
        self._with_logprobs = request.with_logprobs
        self._tokenizer = model.tokenizer
        self._items: list[TextItem | CallItem] = []
        self._pending_logprobs: list[dict[str, Any]] = []  # The parser holds back the text of their tokens.
        self._cut = False  # whether the length limit ended the response

    async def keep(self, items: list[Item]) -> None:
        """Store the finished response. If there is no room for it, it says so."""
        assert self._keep is not None
        response = self.body()
        if not await self._keep(response, items):
            response["store"] = False
        self._kept = response

    def body(self) -> dict[str, Any]:
        return self._kept or self.response("incomplete" if self._cut else "completed")

    def end_events(self) -> list[bytes]:
        response = self.body()
        return [self.encode({"type": f"response.{response['status']}", "response": response})]

    def error_events(self, error: APIError) -> list[bytes]:
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        body = error.body["error"]
        fields = {"code": body["code"] or body["type"], "message": body["message"], "param": body["param"]}
        response = self.response("failed") | {"error": {"code": "server_error", "message": body["message"]}}
        events = [{"type": "error", **fields}, {"type": "response.failed", "response": response}]
        return [self.encode(event) for event in (*([] if self.num_encoded else self.first_events()), *events)]

    def encode(self, event: Event) -> bytes:
        return super().encode({**event, "sequence_number": self.num_encoded})

    def first_events(self) -> list[Event]:
        response = self.response("in_progress")
        return [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]

    def update_events(self, update: Update) -> Iterator[Event]:
        if self._with_logprobs:
            self._pending_logprobs += chat_logprobs(update.logprobs, self._tokenizer)
        return super().update_events(update)

    def part_events(self, part: AssistantPart) -> Iterator[Event]:
        match part:
            case ReasoningDelta(text=text):
                self._pending_logprobs = []  # only messages have logprobs
                yield from self._add_text(text, is_message=False)
            case ContentDelta(text=text):
                yield from self._add_text(text, is_message=True)
            case CallBegun(call_id=call_id, name=name):
                self._pending_logprobs = []  # calls have no logprobs
                yield from self._begin(self._new_call(call_id, name))
            case ArgumentsDelta(text=text):
                call = self._items[-1]
                assert isinstance(call, CallItem)
                yield from call.argument_events(len(self._items) - 1, text)

    def last_events(self, update: Update) -> Iterator[Event]:
        self._cut = update.finish_reason == "length"
        if not self._items or (self._is_in_text(is_message=False) and not self._cut):  # empty output
            yield from self._begin(TextItem(True, _item_id("msg")))
        if self._pending_logprobs and self._is_in_text(is_message=True):
            yield from self._add_text("", is_message=True)  # the EOS token has a logprob but no text
        yield from self._close("incomplete" if self._cut else "completed")

    def _is_in_text(self, *, is_message: bool) -> bool:
        last = self._items[-1] if self._items else None
        return isinstance(last, TextItem) and last.is_message == is_message

    def _add_text(self, text: str, *, is_message: bool) -> Iterator[Event]:
        """Add text to the last item, or begin one of this kind."""
        if not self._is_in_text(is_message=is_message):
            yield from self._begin(TextItem(is_message, _item_id("msg" if is_message else "rs")))
        item, logprobs, self._pending_logprobs = self._items[-1], self._pending_logprobs, []
        assert isinstance(item, TextItem)
        yield item.text_event(len(self._items) - 1, text, logprobs)

    def _new_call(self, call_id: str, shown: str) -> CallItem:
        tool = self._tools.of_call(shown)
        if tool is None:
            return CallItem(call_id, shown)
        return (CustomCallItem if tool.custom else CallItem)(call_id, tool.name, tool.namespace)

    def _begin(self, item: TextItem | CallItem) -> Iterator[Event]:
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

    def response(self, status: str) -> dict[str, Any]:
        finished = status not in ("in_progress", "queued")
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

    verbosity = request.verbosity if "verbosity" in model.tokenizer.template_reads else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "text": {"format": request.text_format, "verbosity": verbosity or "medium"},
        "tools": request.offered_tools.echo,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.effort, "summary": None},
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "max_tool_calls": request.max_tool_calls,
        "previous_response_id": request.previous_response_id,
        **({} if request.conversation_id is None else {"conversation": {"id": request.conversation_id}}),
        "truncation": request.truncation or "disabled",
        "service_tier": request.service_tier or DEFAULT_CLASS,
    }
