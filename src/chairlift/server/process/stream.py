"""What the engine says about one HTTP request, on its way from the socket to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from chairlift.server.process.messages import Update


class Watcher(Protocol):
    """Learns at once what arrives on a stream, however slowly the client reads it."""

    def note(self, update: Update) -> None: ...
    def cut_short(self, reason: str, count: int) -> None: ...


class Stream:
    """What the engine says about the completions of one HTTP request, merged until someone takes it.

    A slow reader therefore holds at most its own unread output, and nobody waits for it.
    """

    def __init__(
        self, ids: Sequence[str], watcher: Watcher | None = None, sequences: Mapping[str, int] | None = None
    ) -> None:
        """`sequences`: how many the engine works on for a completion, where that is more than the completion itself:
        beams, or those that `best_of` compares."""
        self.ids = list(ids)  # in the order of the choices
        self.sequences = dict.fromkeys(self.ids, 1) | dict(sequences or {})
        self._watcher = watcher
        self._open = set(self.ids)
        self._pending: dict[str, list[Update]] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._silent = self._nudged = False

    def nudge(self) -> None:
        """Called now and then: if nothing came since the last time, the reader gets an empty list of updates."""
        self._nudged, self._silent = self._silent, True
        if self._nudged:
            self._news.set()

    def push(self, update: Update) -> None:
        self._pending.setdefault(update.request_id, []).append(update)
        if update.finish_reason is not None:
            self._open.discard(update.request_id)
        if self._watcher is not None:
            self._watcher.note(update)
        self._silent = self._nudged = False
        self._news.set()

    def end(self, reason: str, error: Exception | None = None) -> list[str]:
        """Nothing more will come: what was open ended for this reason. Returns the ids of those; a reader gets
        what is still unread, and then the error."""
        ended = sorted(self._open)
        self._open.clear()
        self._error = self._error or error
        if self._watcher is not None and ended:
            self._watcher.cut_short(reason, len(ended))
        self._news.set()
        return ended

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        while self._open or self._pending or self._error:
            await self._news.wait()
            self._news.clear()
            updates, self._pending = [_merged(parts) for parts in self._pending.values()], {}
            if updates or self._nudged:
                self._nudged = False
                yield updates
            if self._error is not None:
                raise self._error


def _merged(parts: list[Update]) -> Update:
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[found for part in parts for found in part.logprobs],
        cached_tokens=next((part.cached_tokens for part in parts if part.cached_tokens is not None), None),
    )
