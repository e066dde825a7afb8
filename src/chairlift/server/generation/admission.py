"""Admission control: capacity is reserved for a request before any work is done for it.

All tenants share the queue. While it is full, a request of a tenant below its share is still admitted, and displaces
the newest waiting requests of the tenant that is furthest above its own: those are answered with 429, as if they had
come later. Requests with output are never displaced, so the queue may grow beyond its limit, up to twice of it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from chairlift.errors import InvalidParameter
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.wire.errors import APIError, too_busy, unavailable
from chairlift.server.wire.limits import MOST_OVER_LIMIT, Limits, SharedLimit, shares_of
from chairlift.server.wire.messages import Loaded


class Admission(ABC):
    """Reserves capacity for sequences, which another process may have to grant, and for text jobs of this process."""

    def __init__(self, metrics: Metrics, limits: Limits) -> None:
        self.draining = False  # shutting down: refuse all new requests
        self._metrics = metrics
        self._limits = limits
        self._text_jobs = SharedLimit(limits.max_text_jobs, limits.tenant_weights)

    @abstractmethod
    def reserve(self, num_prompts: int, n: int, tenant: str) -> AbstractAsyncContextManager[Loaded]:
        """Reserve capacity for one request's sequences until they are submitted; from then on the engine client counts
        them."""

    @contextmanager
    def reserve_text_job(self, tenant: str) -> Iterator[None]:
        """Reserve one text job: parsing, tokenization or detokenization without the engine."""
        self._check_not_draining()
        has_room = self._text_jobs.take(tenant, 1)
        try:
            if not has_room:
                raise self._too_busy("too many texts are being tokenized; try again in a moment")
            yield
        finally:
            self._text_jobs.give_back(tenant, 1)

    def _check_not_draining(self) -> None:
        if self.draining:
            self._metrics.refused.labels("503").inc()
            raise unavailable("the server is shutting down")

    def _too_busy(self, message: str) -> APIError:
        self._metrics.refused.labels("429").inc()
        return too_busy(message)

    def _displaced(self) -> APIError:
        return self._too_busy("the queue is full, and other clients have a claim to this place; try again in a moment")

    @asynccontextmanager
    async def _until_displaced(self, scope: asyncio.Timeout) -> AsyncIterator[None]:
        """Cancel the body of the `async with` and raise a 429 error when `scope` expires."""
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._displaced() from None


@dataclass(slots=True, eq=False)
class Reservation:
    """Capacity for sequences that are not yet submitted to the engine."""

    tenant: str
    count: int
    loaded: Loaded
    on_displaced: Callable[[], None]


class AdmissionControl(Admission):
    def __init__(self, engine: EngineClient, metrics: Metrics, limits: Limits) -> None:
        super().__init__(metrics, limits)
        self._engine = engine
        self._reservations: dict[Reservation, None] = {}  # The order is that of arrival.

    @property
    def num_preparing(self) -> int:
        """Number of sequences that are reserved but not yet submitted to the engine."""
        # Another thread may read this while requests come and go.
        return sum(one.count for one in list(self._reservations))

    @asynccontextmanager
    async def reserve(self, num_prompts: int, n: int, tenant: str) -> AsyncIterator[Loaded]:
        scope = asyncio.timeout(None)
        reservation = self.take(num_prompts, n, tenant, partial(scope.reschedule, 0.0))
        try:
            async with self._until_displaced(scope):
                yield reservation.loaded
        finally:
            self.release(reservation)

    def take(self, num_prompts: int, n: int, tenant: str, on_displaced: Callable[[], None]) -> Reservation:
        """Reserve capacity until `release`; `on_displaced` is called if it is taken away before."""
        count = num_prompts * n
        self._check_not_draining()
        loaded, state = self._engine.loaded, self._engine.state
        if state is not EngineState.READY or loaded is None:
            self._metrics.refused.labels("503").inc()
            raise unavailable(f"the engine is {state.value}")
        capacity = loaded.max_batch_requests + self._limits.max_waiting
        most = min(self._limits.max_completions, capacity)
        if count > most:
            problem = (
                f"{count} completions (prompts times n, best_of or beam_width) in one request; the limit is {most}"
            )
            raise InvalidParameter("n" if n > 1 else "prompt", problem)
        missing = count + self._engine.requests.num_sequences + self.num_preparing - capacity
        if missing > 0:
            self._claim_share(missing, tenant, count, capacity)
        reservation = Reservation(tenant, count, loaded, on_displaced)
        self._reservations[reservation] = None
        return reservation

    def release(self, reservation: Reservation) -> None:
        self._reservations.pop(reservation, None)

    def _claim_share(self, missing: int, tenant: str, count: int, capacity: int) -> None:
        """End waiting requests of tenants above their share until `missing` sequences are free or none is left; raises
        if `tenant` would exceed its own share."""
        using = Counter(self._engine.requests.sequences_by_tenant)
        for one in self._reservations:
            using[one.tenant] += one.count
        using[tenant] += count
        share = shares_of(capacity, using, self._limits.tenant_weights)
        if using[tenant] > share[tenant] or using.total() > MOST_OVER_LIMIT * capacity:
            raise self._too_busy("the queue is full; try again in a moment")
        waiting = self._newest_waiting()
        waiting.pop(tenant, None)
        while missing > 0:
            excess = {other: using[other] / share[other] for other, found in waiting.items() if found}
            largest = max(excess, key=excess.__getitem__, default=tenant)
            if excess.get(largest, 0.0) <= 1.0:
                return
            size, end = waiting[largest].pop(0)
            using[largest] -= size
            missing -= size
            end()

    def _newest_waiting(self) -> dict[str, list[tuple[int, Callable[[], None]]]]:
        """The number of sequences of each waiting request, and how to end it, by tenant; the newest first."""
        found: defaultdict[str, list[tuple[int, Callable[[], None]]]] = defaultdict(list)
        for one in reversed(self._reservations):
            found[one.tenant].append((one.count, partial(self._displace, one)))
        for stream in self._engine.requests.newest_waiting():
            end = partial(self._engine.displace, stream, self._displaced)
            found[stream.tenant].append((stream.num_open, end))
        return found

    def _displace(self, reservation: Reservation) -> None:
        self.release(reservation)
        reservation.on_displaced()
