"""Cancellation of work for disconnected clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from chairlift.server.http.errors import APIError

T = TypeVar("T")


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client closed the connection", type_="client_closed")
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
