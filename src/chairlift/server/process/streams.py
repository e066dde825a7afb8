"""Open requests: their streams of updates, and the refusal of those that were in flight when the engine died."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from chairlift.core.events import completion_ids
from chairlift.core.targets import NO_TARGETS
from chairlift.errors import InvalidParameter
from chairlift.server.wire.messages import Submit, Update, encode


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
        self.ids = list(ids)  # The order is that of the choices.
        self.sequences = dict.fromkeys(self.ids, 1) | dict(sequences or {})
        self.tenant = tenant
        self.fingerprints = fingerprints or {}
        self.is_waiting = True  # It is in the engine's queue: no update has arrived.
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
        return sum(self.sequences[completion] for completion in self._open)

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


class OpenRequests:
    """The streams of open completions, and how many sequences the engine has for each tenant."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self.sequences_by_tenant: Counter[str] = Counter()
        self.quarantine = Quarantine()
        self._streams: dict[str, UpdateStream] = {}  # The key is the completion's id; the order is that of submission.
        self._just_failed: list[bytes] = []  # fingerprints of completions that the last step ended with an error

    def streams(self) -> Iterable[UpdateStream]:
        """Return every stream once, in order of submission."""
        return dict.fromkeys(self._streams.values())

    def get(self, completion_id: str) -> UpdateStream | None:
        return self._streams.get(completion_id)

    def newest_waiting(self) -> list[UpdateStream]:
        """The streams whose requests wait in the engine's queue, the newest first."""
        return [stream for stream in self.streams() if stream.is_waiting][::-1]

    def open(
        self, requests: Sequence[Submit], observer: UpdateObserver | None, make_stream: Callable[..., UpdateStream]
    ) -> UpdateStream:
        """Return the stream of the requests for all prompts of one HTTP request; raises if one of them is refused."""
        fingerprints: dict[str, bytes] = {}  # The key is the completion.
        sequences: dict[str, int] = {}
        for request in requests:
            digest = fingerprint(request)
            self.quarantine.check(digest)
            fingerprints |= dict.fromkeys(completion_ids(request.request_id, request.params.n), digest)
            if request.params.beam_width or request.params.best_of:
                # Sequences without updates count with the first completion: all sequences of a search end together.
                sequences[request.request_id] = 1 + request.params.num_sequences - request.params.n
        stream = make_stream(
            list(fingerprints), observer, sequences, tenant=requests[0].tenant, fingerprints=fingerprints
        )
        for completion, count in stream.sequences.items():
            self._streams[completion] = stream
            self._count(stream.tenant, count)
        return stream

    def deliver(self, update: Update) -> None:
        """Give an update to its stream, unless it was cancelled before."""
        stream = self._streams.get(update.request_id)
        if stream is None:
            return
        stream.push(update)
        if update.finish_reason is None:
            return
        self._close(update.request_id)
        digest = stream.fingerprints[update.request_id]
        if update.finish_reason == "error":
            self._just_failed.append(digest)
        else:
            self.quarantine.clear(digest)

    def begin_step(self) -> None:
        """The updates that follow are those of another step."""
        self._just_failed = []

    def record_death(self) -> None:
        """Remember the requests in flight. A step that raised has ended them in its last report."""
        in_flight = [stream.fingerprints[completion] for completion, stream in self._streams.items()]
        self.quarantine.record_death([*in_flight, *self._just_failed])
        self._just_failed = []

    def remove(self, stream: UpdateStream) -> None:
        for completion in stream.ids:
            if completion in self._streams:
                self._close(completion)

    def remove_all(self) -> list[UpdateStream]:
        """Return all streams, which are no longer open."""
        streams = list(self.streams())
        self._streams.clear()
        self.sequences_by_tenant.clear()
        self.num_sequences = 0
        return streams

    def _close(self, completion_id: str) -> None:
        stream = self._streams.pop(completion_id)
        self._count(stream.tenant, -stream.sequences[completion_id])

    def _count(self, tenant: str, count: int) -> None:
        self.num_sequences += count
        self.sequences_by_tenant[tenant] += count
        if not self.sequences_by_tenant[tenant]:
            del self.sequences_by_tenant[tenant]


MAX_DEATHS = 2
FORGET_SECONDS = 600.0  # It counts from the last death.
MAX_SUSPECTS = 10_000


def fingerprint(request: Submit) -> bytes:
    """Return what equal requests have in common, whichever client sends them and however often."""
    client = {"timeout": None, "cache_salt": "", "priority": 0, "tenant": "", "targets": NO_TARGETS}
    same = msgspec.structs.replace(request, request_id="", service_class="", **client)
    return hashlib.blake2b(encode(same), digest_size=16).digest()


@dataclass(slots=True)
class _Suspect:
    deaths: int
    last_death: float


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}  # The key is the fingerprint; the order is that of the last death.

    def __bool__(self) -> bool:
        """Whether any request is suspected."""
        return bool(self._suspects)

    def check(self, digest: bytes) -> None:
        """Raise if requests with this fingerprint are refused."""
        if not self._suspects:
            return
        self._forget()
        suspect = self._suspects.get(digest)
        if suspect is not None and suspect.deaths >= MAX_DEATHS:
            problem = f"this request was in flight when the engine died {suspect.deaths} times"
            raise InvalidParameter("prompt", f"{problem}; it is refused for {FORGET_SECONDS / 60:g} minutes")

    def record_death(self, in_flight: Iterable[bytes]) -> None:
        now = self._clock()
        for digest in set(in_flight):
            before = self._suspects.pop(digest, None)
            self._suspects[digest] = _Suspect(1 + (before.deaths if before else 0), now)
        self._forget()

    def clear(self, digest: bytes) -> None:
        """Remove the suspicion from a request that the engine has finished."""
        self._suspects.pop(digest, None)

    def _forget(self) -> None:
        oldest = self._clock() - FORGET_SECONDS
        for digest, suspect in list(self._suspects.items()):
            if suspect.last_death >= oldest and len(self._suspects) <= MAX_SUSPECTS:
                return
            del self._suspects[digest]
