"""Responses from a stream of updates: one body, or server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from chairlift.errors import ChairliftError
from chairlift.server.generation.endpoint import ResponseBuilder
from chairlift.server.generation.usage import Usage
from chairlift.server.wire.errors import ENGINE_DIED, APIError, as_api_error, log_unexpected, timed_out
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import AssistantParser, AssistantPart

LARGE_BODY = 20_000  # values or characters of a response that is encoded in a thread
PIECE = 1000  # values that are encoded at a time
MAX_DEPTH = 5  # Lists down to this depth are encoded in pieces: the log-probabilities in a message of a choice.
LOGPROB_VALUES = 20  # About as many as one token has.

Event = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class PartsBuilder(ResponseBuilder):
    """Builds a response from the parts of one completion, by named events. A whole response is built from the events of
    a stream, which are discarded."""

    def __init__(self, parser: AssistantParser, usage: Usage) -> None:
        self.usage = usage
        self.num_encoded = 0
        self._parser = parser

    @abstractmethod
    def first_events(self) -> list[Event]:
        """Return the events that begin a stream."""

    @abstractmethod
    def part_events(self, part: AssistantPart) -> Iterator[Event]:
        """Add a part, and yield the events about it."""

    @abstractmethod
    def last_events(self, update: Update) -> Iterator[Event]:
        """Yield the events after all parts of a completion, of which this is the last update."""

    def update_events(self, update: Update) -> Iterator[Event]:
        for part in self._parser.push(update.text):
            yield from self.part_events(part)
        if update.finish_reason is not None:
            for part in self._parser.close():
                yield from self.part_events(part)
            yield from self.last_events(update)

    def add(self, update: Update) -> None:
        for _ in self.update_events(update):
            pass

    def events(self, update: Update) -> list[bytes]:
        first = [] if self.num_encoded else self.first_events()
        return [self.encode(event) for event in (*first, *self.update_events(update))]

    def encode(self, event: Event) -> bytes:
        self.num_encoded += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


async def collect(updates: AsyncIterator[list[Update]], builder: ResponseBuilder) -> int:
    """Add all updates to a whole response; return about how many values or characters it has."""
    size = 0
    async for batch in updates:
        for update in batch:
            builder.usage.add(update)
            _raise_if_cut_short(update)
            builder.add(update)
            size += len(update.text) + len(update.vector) // 4
            size += LOGPROB_VALUES * (len(update.logprobs) + len(update.prompt_logprobs))
    return size


async def encoded_body(builder: ResponseBuilder, size: int) -> bytes:
    """Return the whole response as JSON."""
    if size < LARGE_BODY:
        return _encode(builder.body())
    return await asyncio.to_thread(lambda: b"".join(json_pieces(builder.body())))


def json_pieces(value: Any, depth: int = MAX_DEPTH) -> Iterator[bytes]:
    """Encode a value in pieces, between which other threads run: to encode a hundred megabytes takes a second."""
    if not depth or not isinstance(value, dict | list):
        yield _encode(value)
    elif isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if index else b"{", _encode(name))
            yield from json_pieces(item, depth - 1)
        yield b"}" if value else b"{}"
    elif value and isinstance(value[0], dict | list):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from json_pieces(item, depth - 1)
        yield b"]"
    else:
        for begin in range(0, len(value), PIECE):
            yield (b"," if begin else b"[") + _encode(value[begin : begin + PIECE])[1:-1]
        yield b"]" if value else b"[]"


async def first_updates(updates: AsyncIterator[list[Update]]) -> list[Update]:
    """Return the first updates of a stream. An error among them still gets its own status code."""
    batch = await anext(updates)
    for update in batch:
        _raise_if_cut_short(update)
    return batch


async def response_events(
    first: list[Update],
    updates: AsyncIterator[list[Update]],
    builder: ResponseBuilder,
    request_id: str,
    ping_seconds: float,
    finish: Callable[[], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed response. Errors become events, because the status was already sent."""
    try:
        sent = time.monotonic()
        if data := _events(first, builder):
            yield data
        async for batch in updates:
            data = _events(batch, builder)
            if not data and time.monotonic() - sent > ping_seconds:
                data = builder.ping()  # The output is held back, or is reasoning that is not shown.
            if data:
                yield data
                sent = time.monotonic()
        await finish()
        yield b"".join(builder.end_events())
    except Exception as error:
        if not isinstance(error, APIError | ChairliftError):
            log_unexpected(error, request_id)
        shown = as_api_error(error)
        builder.usage.engine_died = shown.code == ENGINE_DIED
        for event in builder.error_events(shown):
            yield event


def _events(batch: list[Update], builder: ResponseBuilder) -> bytes:
    """Join the events of several updates: each write costs a system call and wakes the client."""
    events: list[bytes] = []
    for update in batch:
        builder.usage.add(update)
        _raise_if_cut_short(update)
        events += builder.events(update)
    return b"".join(events) if batch else builder.ping()


def _raise_if_cut_short(update: Update) -> None:
    if update.finish_reason == "deadline":
        raise timed_out()
    if update.finish_reason in ("error", "cancelled"):
        raise APIError(500, "the request could not be finished", type_="server_error")


class EventStream(StreamingResponse):
    """A stream of events. `on_end` runs however the response ends, even if it was never started."""

    def __init__(
        self, events: AsyncIterator[bytes], on_end: Callable[[], object], media_type: str = ResponseBuilder.media_type
    ) -> None:
        # X-Accel-Buffering keeps nginx from buffering the events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
