"""From a stream of updates to an HTTP response, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from chairlift.server.http.errors import APIError, as_api_error, timed_out
from chairlift.server.openai.response_builder import Answer
from chairlift.server.process.messages import Update

T = TypeVar("T")

# A line that clients skip; it shows the proxies on the way that a silent connection is alive.
PING = b": waiting\n\n"


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Await `work`, but drop it as soon as the client has gone away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client closed the connection", type_="client_closed")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def collect(updates: AsyncIterator[list[Update]], answer: Answer) -> None:
    """The whole answer."""
    async for batch in updates:
        for update in batch:
            answer.usage.take_in(update)
            _raise_if_cut_short(update)
            answer.keep(update)


async def first_of(updates: AsyncIterator[list[Update]]) -> list[Update]:
    """The first batch: an error that shows by then still gets a status of its own."""
    batch = await anext(updates)
    for update in batch:
        _raise_if_cut_short(update)
    return batch


async def events(first: list[Update], updates: AsyncIterator[list[Update]], answer: Answer) -> AsyncIterator[bytes]:
    """The answer piece by piece. Errors are told too: by now a status has been sent."""
    try:
        if told := _events_of(first, answer):
            yield told
        async for batch in updates:
            if told := _events_of(batch, answer):
                yield told
        yield b"".join(answer.ending())
    except Exception as error:
        for event in answer.failure(as_api_error(error)):
            yield event


def _events_of(batch: list[Update], answer: Answer) -> bytes:
    """In one piece: each that is sent by itself costs a call of the system and a wake-up of the client."""
    told: list[bytes] = []
    for update in batch:
        answer.usage.take_in(update)
        _raise_if_cut_short(update)
        told += answer.events(update)
    return b"".join(told) if batch else PING


def _raise_if_cut_short(update: Update) -> None:
    """Endings that are no answer."""
    if update.finish_reason == "deadline":
        raise timed_out()
    if update.finish_reason in ("error", "cancelled"):
        raise APIError(500, "the request could not be finished", type_="server_error")


class EventStream(StreamingResponse):
    """Server-sent events; `on_end` runs however the response ends, even if it never got to begin."""

    def __init__(self, told: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        # The second header asks nginx not to collect the pieces.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(told, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
