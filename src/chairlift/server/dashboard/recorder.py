"""What the live page is told: a compact record of the engine's steps, kept only while somebody watches.

The engine waits while this runs, so it is written for little work per step. Most steps only repeat the one before, a
token further: a request that decodes is written down as one *run* of many steps, and a step with nobody new costs one
comparison of two lists. What is sent then grows with the requests and the steps, not with their product.
docs/dashboard.md describes the frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chairlift.core.events import (
    DraftsVerified,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    StepDone,
    TextProduced,
    TokenProduced,
)
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.server.dashboard.tenant_numbers import TenantNumbers

Frame = dict[str, Any]

FORMAT = 1
SHOWN_WAITING = 60  # of a long queue, those in front; all are counted
UNKNOWN = -1  # how much of a table the page knows, where it has changed in the middle
_FREQUENT = frozenset({TokenProduced, TextProduced})  # hundreds of them in every step


class _Seen:
    """A request that the page knows of."""

    __slots__ = ("handle", "num_sent", "over", "request")

    def __init__(self, handle: int, request: Request) -> None:
        self.handle = handle  # a small number that stands for it in all frames
        self.request = request
        self.num_sent = 0  # how many blocks of its table the page knows of
        self.over = request.status is Status.FINISHED  # and the page knows


class _Run:
    """A request that decodes a token in every step, since the last frame or a later step."""

    __slots__ = ("first", "handle", "start")

    def __init__(self, handle: int, first: int, start: int) -> None:
        self.handle = handle
        self.first = first  # index of its first step in the frame
        self.start = start  # position of its token there


class Recorder:
    """Watches one engine from the first keyframe on. Everything it says is cleared by saying it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._seen: dict[str, _Seen] = {}
        self._num_seen = 0
        self._brief: dict[str, int] = {}  # handles of those whose end is all that is left to tell
        self._tenants = TenantNumbers()
        self._decoding: list[Request] = []  # in the last step
        self._decoding_set: set[Request] = set()  # the same
        self._runs: dict[str, _Run] = {}  # those under way, by request
        self._policy = ""
        self._in_step: Sequence[Chunk] = ()
        self._clear()

    def _clear(self) -> None:
        self._lists: dict[str, list[Any]] = {}
        self._num_steps = 0

    def stop(self) -> None:
        self._kv.track_changes(False)

    # ---- what happens --------------------------------------------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        """The events of one call of `Engine.step`."""
        done = events[-1] if events and isinstance(events[-1], StepDone) else None
        plan = done.plan if done is not None else None
        self._in_step = plan.chunks if plan is not None else ()
        accepted: dict[str, int] = {}
        for event in [each for each in events if type(each) not in _FREQUENT]:
            match event:
                case DraftsVerified():
                    accepted[event.request_id] = event.accepted
                case RequestQueued(time, request_id, num_prompt):
                    if self._know(request_id) is None:  # over already: it was cancelled before the next step
                        self._brief[request_id] = self._num_seen
                        self._list("new").append(
                            [self._num_seen, request_id, _seconds(time), num_prompt, 0, self._tenants.number_of(""), 0]
                        )
                        self._num_seen += 1
                case RequestAdmitted(time, request_id, cached, miss, swapped):
                    reason = miss.name.lower() if miss else None
                    self._add("board", request_id, _seconds(time), cached, reason, swapped)
                case RequestPreempted(time, request_id, computed, swapped):
                    seen = self._add("preempt", request_id, _seconds(time), computed, int(swapped))
                    if seen is not None:
                        seen.num_sent = UNKNOWN
                case RequestFinished(time, request_id, ending):
                    self._finish(request_id, _seconds(time), ending.reason.value)
        if done is not None and plan is not None:
            self._note_step(done, plan, accepted)

    def _list(self, name: str) -> list[Any]:
        return self._lists.setdefault(name, [])

    def _add(self, kind: str, request_id: str, *what: Any) -> _Seen | None:
        seen = self._know(request_id)
        if seen is not None:
            self._list(kind).append([seen.handle, self._num_steps, *what])
        return seen

    def _know(self, request_id: str) -> _Seen | None:
        seen = self._seen.get(request_id)
        if seen is None:
            request = self._scheduler.get(request_id) or self._find_in_step(request_id)
            if request is None:
                return None
            seen = self._seen[request_id] = _Seen(self._num_seen, request)
            self._num_seen += 1
            self._list("new").append(self._description(seen))
        return seen

    def _find_in_step(self, request_id: str) -> Request | None:
        """One that came and went in a single step."""
        return next((chunk.request for chunk in self._in_step if chunk.request.id == request_id), None)

    def _description(self, seen: _Seen) -> list[Any]:
        request, tenant = seen.request, self._tenants.number_of(seen.request.tenant)
        arrival = _seconds(request.arrival)
        return [seen.handle, request.id, arrival, request.num_prompt, request.max_new_tokens, tenant, request.priority]

    def _finish(self, request_id: str, time: float, reason: str) -> None:
        if request_id in self._brief:
            self._list("end").append([self._brief.pop(request_id), self._num_steps, time, reason, 0, 0])
        seen = self._seen.get(request_id)
        if seen is not None:
            seen.over = True
            keeps_seat = int(self._scheduler.policy.keeps_slots)  # if it had one, and until its batch is over
            self._list("end").append([seen.handle, self._num_steps, time, reason, seen.request.num_output, keeps_seat])

    def _note_step(self, done: StepDone, plan: StepPlan, accepted: Mapping[str, int]) -> None:
        limits, timing, index = self._scheduler.limits, done.timing, self._num_steps
        self._list("steps").append(
            [
                done.step,
                _seconds(done.time),
                _seconds(done.seconds),
                _seconds(done.predicted_seconds or 0.0),
                done.decode_tokens,
                done.prefill_tokens,
                done.padding_tokens,
                plan.idle_rows,
                done.waiting,
                done.used_blocks,
                limits.tokens if limits else 0,
                limits.prefill_tokens if limits else 0,
                [
                    _seconds(part)
                    for part in (done.schedule_seconds, timing.build, timing.forward, timing.sample, done.apply_seconds)
                ],
            ]
        )
        if done.prefill_tokens or done.decode_tokens > len(plan.chunks):
            # What makes a plain decode, without the call of a function for each.
            decoding = [one.request for one in plan.chunks if one.count == 1 and one.start >= one.request.num_prompt]
            others = [one for one in plan.chunks if one.count > 1 or one.start < one.request.num_prompt]
            self._note_chunks(others, index, accepted)
        else:
            decoding = [chunk.request for chunk in plan.chunks]
        if decoding != self._decoding:
            self._change_runs(plan.chunks, decoding, index)
        self._num_steps += 1

    def _note_chunks(self, chunks: Sequence[Chunk], index: int, accepted: Mapping[str, int]) -> None:
        for chunk in chunks:
            seen = self._know(chunk.request.id)
            if seen is not None:
                drafts = (len(chunk.drafts), accepted.get(chunk.request.id, 0)) if chunk.drafts else ()
                self._list("chunks").append([seen.handle, index, chunk.start, chunk.count, *drafts])

    def _change_runs(self, chunks: Sequence[Chunk], decoding: list[Request], index: int) -> None:
        """End the runs of those who no longer decode, and begin one for everyone who does now."""
        now, before = set(decoding), self._decoding_set
        for request in before - now:
            run = self._runs.pop(request.id, None)
            if run is not None and index > run.first:
                self._list("runs").append([run.handle, run.first, index - run.first, run.start])
        if joined := now - before:
            for chunk in chunks:
                seen = self._know(chunk.request.id) if chunk.request in joined else None
                if seen is not None:
                    self._runs[chunk.request.id] = _Run(seen.handle, index, chunk.start)
        self._decoding, self._decoding_set = decoding, now

    def _cut_runs(self) -> None:
        """What was told of them is told; they go on from here."""
        runs, steps = self._list("runs"), self._num_steps
        for run in self._runs.values():
            count = steps - run.first
            if count:
                runs.append([run.handle, run.first, count, run.start])
                run.start += count
            run.first = 0

    # ---- what is said of it --------------------------------------------------------------------------------------

    def frame(self, now: float) -> Frame:
        """All since the last frame, and how things stand."""
        self._cut_runs()
        changes = self._kv.take_changes()
        self._note_tables(changes.rewritten)
        frame = {"t": "batch", "now": _seconds(now), **self._standing(), **self._lists}
        if changes.blocks:
            frame["blocks"] = self._states(changes.blocks)
        self._clear()
        return frame

    def keyframe(self, now: float, wall: float) -> Frame:
        """Everything there is to know at this moment, for a page that knows nothing. What happened since the last
        frame must have been said before."""
        scheduler, pool = self._scheduler, self._kv.pool
        for request_id in scheduler.open_requests():
            self._know(request_id)
        for request in scheduler.idle:
            self._know(request.id)
        self._lists.pop("new", None)  # they are all in here
        self._policy = ""  # to be said again
        self._kv.track_changes(True)
        return {
            "t": "key",
            "format": FORMAT,
            "now": _seconds(now),
            "wall": round(wall, 3),
            "seats": scheduler.max_batch_requests,
            "num_blocks": pool.num_blocks,
            "block_size": self._kv.block_size,
            "prefix_caching": self._kv.prefix_caching,
            "order": scheduler.ordering.name,
            **self._standing(),
            "requests": [self._whole_description(seen) for seen in self._seen.values()],
            "blocks": self._states(block for block in range(pool.num_blocks) if self._is_worth_saying(block)),
        }

    def new_tenants(self, *, all_of_them: bool = False) -> dict[int, str]:
        """The names behind the numbers of tenants, as far as they were not told yet."""
        return self._tenants.take_all() if all_of_them else self._tenants.take_untold()

    def _whole_description(self, seen: _Seen) -> list[Any]:
        request, table = seen.request, list(self._kv.table(seen.request))
        seen.num_sent = len(table)
        state = {Status.WAITING: "waiting", Status.RUNNING: "running"}.get(request.status, "idle")
        return [*self._description(seen), state, request.num_computed, request.num_output, table]

    def _standing(self) -> Frame:
        waiting = self._scheduler.waiting
        counts = waiting.reasons()
        shown = [
            [self._seen[request.id].handle, waiting.last_reason(request).name.lower()]
            for request in waiting[:SHOWN_WAITING]
            if request.id in self._seen
        ]
        standing: Frame = {
            "waiting": shown,
            "reasons": {reason.name.lower(): count for reason, count in counts.items()},
            "evictions": self._kv.pool.num_evictions,
        }
        if self._scheduler.policy.name != self._policy:
            self._policy = self._scheduler.policy.name
            standing["policy"] = self._policy
        return standing

    def _note_tables(self, rewritten: set[str]) -> None:
        for seen in list(self._seen.values()):
            table = self._kv.table(seen.request)
            if seen.request.id in rewritten:
                seen.num_sent = UNKNOWN
            if len(table) != seen.num_sent:
                start = seen.num_sent if 0 <= seen.num_sent < len(table) else 0
                self._list("tables").append([seen.handle, start, list(table[start:])])
                seen.num_sent = len(table)
            if seen.over and not table:
                del self._seen[seen.request.id]

    def _is_worth_saying(self, block: int) -> bool:
        return self._kv.pool.references(block) > 0 or self._kv.pool.is_cached(block)

    def _states(self, blocks: Iterable[int]) -> list[int]:
        """block, references, cached; block, references, cached; …"""
        pool = self._kv.pool
        return [number for block in blocks for number in (block, pool.references(block), int(pool.is_cached(block)))]


def _seconds(value: float) -> float:
    return round(value, 6)
