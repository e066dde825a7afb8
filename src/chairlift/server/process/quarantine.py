"""Refuses requests that were in flight when the engine died twice, so that they cannot kill it again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.process.messages import Submit, encode

MAX_DEATHS = 2
FORGET_SECONDS = 600.0  # since the last death
MAX_SUSPECTS = 10_000


def fingerprint(request: Submit) -> bytes:
    """Return what equal requests have in common, whichever client sends them and however often."""
    same = msgspec.structs.replace(request, request_id="", timeout=None, cache_salt="", priority=0, tenant="")
    return hashlib.blake2b(encode(same), digest_size=16).digest()


@dataclass(slots=True)
class _Suspect:
    deaths: int
    last_death: float


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}  # by fingerprint, in order of the last death

    def __bool__(self) -> bool:
        """Whether any request is suspected."""
        return bool(self._suspects)

    def check(self, one: bytes) -> None:
        """Raise if requests with this fingerprint are refused."""
        if not self._suspects:
            return
        self._forget()
        suspect = self._suspects.get(one)
        if suspect is not None and suspect.deaths >= MAX_DEATHS:
            problem = f"this request was in flight when the engine died {suspect.deaths} times"
            raise InvalidParameter("prompt", f"{problem}; it is refused for {FORGET_SECONDS / 60:g} minutes")

    def record_death(self, in_flight: Iterable[bytes]) -> None:
        now = self._clock()
        for one in set(in_flight):
            before = self._suspects.pop(one, None)
            self._suspects[one] = _Suspect(1 + (before.deaths if before else 0), now)
        self._forget()

    def clear(self, one: bytes) -> None:
        """Remove the suspicion from a request that the engine has finished."""
        self._suspects.pop(one, None)

    def _forget(self) -> None:
        oldest = self._clock() - FORGET_SECONDS
        for one, suspect in list(self._suspects.items()):
            if suspect.last_death >= oldest and len(self._suspects) <= MAX_SUSPECTS:
                return
            del self._suspects[one]
