"""Stream of the engine's updates about one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from chairlift.server.process.messages import Update


class UpdateObserver(Protocol):
    """Called when updates arrive, independent of how fast the client reads them."""

    def on_update(self, update: Update) -> None: ...

    def on_cut_short(self, reason: str, count: int) -> None:
        """Called when `count` completions end early, without an update."""


class UpdateStream:
    """Updates about the completions of one HTTP request, merged until they are read.

    A slow reader therefore buffers at most its unread output, and the engine never waits.
    """

    def __init__(
        self,
        ids: Sequence[str],
        observer: UpdateObserver | None = None,
        sequences: Mapping[str, int] | None = None,
        *,
        tenant: str = "",
        fingerprints: Mapping[str, bytes] | None = None,
    ) -> None:
        """`sequences` is the number of sequences that the engine runs for a completion, where that is more than one:
        beams, or the candidates of `best_of`. `fingerprints` are those of the prompts, by completion."""
        self.ids = list(ids)  # in the order of the choices
        self.sequences = dict.fromkeys(self.ids, 1) | dict(sequences or {})
        self.tenant = tenant
        self.fingerprints = fingerprints or {}
        self.is_waiting = True  # in the engine's queue: no update has arrived
        self._observer = observer
        self._open = set(self.ids)
        self._pending: dict[str, list[Update]] = {}
        self._error: Exception | None = None
        self._wakeup = asyncio.Event()
        self._silent = self._ping_due = False

    def ping(self) -> None:
        """Send the reader an empty list of updates if nothing arrived since the last call."""
        self._ping_due, self._silent = self._silent, True
        if self._ping_due:
            self._wakeup.set()

    def push(self, update: Update) -> None:
        self.is_waiting = False
        self._pending.setdefault(update.request_id, []).append(update)
        if update.finish_reason is not None:
            self._open.discard(update.request_id)
        if self._observer is not None:
            self._observer.on_update(update)
        self._silent = self._ping_due = False
        self._wakeup.set()

    @property
    def num_open(self) -> int:
        """Number of sequences that the engine has for open completions."""
        return sum(self.sequences[one_id] for one_id in self._open)

    def open_fingerprints(self) -> list[bytes]:
        return [one for one_id, one in self.fingerprints.items() if one_id in self._open]

    def end(self, reason: str, error: Exception | None = None) -> list[str]:
        """End all open completions for this reason and return their ids. The reader gets the unread updates, then the
        error."""
        ended = sorted(self._open)
        self._open.clear()
        self._error = self._error or error
        if self._observer is not None and ended:
            self._observer.on_cut_short(reason, len(ended))
        self._wakeup.set()
        return ended

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        while self._open or self._pending or self._error:
            await self._wakeup.wait()
            self._wakeup.clear()
            updates, self._pending = [_merge(parts) for parts in self._pending.values()], {}
            if updates or self._ping_due:
                self._ping_due = False
                yield updates
            if self._error is not None:
                raise self._error


def _merge(parts: list[Update]) -> Update:
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[item for part in parts for item in part.logprobs],
        prompt_logprobs=[item for part in parts for item in part.prompt_logprobs],
        vector=b"".join(part.vector for part in parts),  # only one has it
        cached_tokens=next((part.cached_tokens for part in parts if part.cached_tokens is not None), None),
    )
