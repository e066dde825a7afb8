"""Admission control: capacity is reserved for a request before any work is done for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from chairlift.errors import InvalidParameter
from chairlift.server.http.errors import too_busy, unavailable
from chairlift.server.limits import Limits
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.process.messages import Loaded


class Admission(ABC):
    """Reserves capacity for sequences, which another process may have to grant, and for text jobs of this process."""

    def __init__(self, metrics: Metrics, limits: Limits) -> None:
        self.draining = False  # shutting down: refuse all new requests
        self._metrics = metrics
        self._limits = limits
        self._text_jobs = 0

    @abstractmethod
    def reserve(self, num_prompts: int, n: int) -> AbstractAsyncContextManager[Loaded]:
        """Reserve capacity for one request's sequences until they are submitted; from then on the engine client counts
        them."""

    @contextmanager
    def reserve_text_job(self) -> Iterator[None]:
        """Reserve one text job: parsing, tokenization or detokenization without the engine."""
        self._check_not_draining()
        if self._text_jobs >= self._limits.max_text_jobs:
            self._metrics.refused.labels("429").inc()
            raise too_busy("too many texts are being tokenised; try again in a moment")
        self._text_jobs += 1
        try:
            yield
        finally:
            self._text_jobs -= 1

    def _check_not_draining(self) -> None:
        if self.draining:
            self._metrics.refused.labels("503").inc()
            raise unavailable("the server is shutting down")


class AdmissionControl(Admission):
    def __init__(self, engine: EngineClient, metrics: Metrics, limits: Limits) -> None:
        super().__init__(metrics, limits)
        self._engine = engine
        self._preparing = 0  # sequences reserved but not yet submitted to the engine

    @asynccontextmanager
    async def reserve(self, num_prompts: int, n: int) -> AsyncIterator[Loaded]:
        count = num_prompts * n
        loaded = self._check_open()
        most = min(self._limits.max_completions, loaded.max_batch_requests + self._limits.max_waiting)
        if count > most:
            problem = (
                f"{count} completions (prompts times n, best_of or beam_width) in one request; the limit is {most}"
            )
            raise InvalidParameter("n" if n > 1 else "prompt", problem)
        room = loaded.max_batch_requests + self._limits.max_waiting - self._engine.num_open - self._preparing
        if count > room:
            self._metrics.refused.labels("429").inc()
            raise too_busy("the queue is full; try again in a moment")
        self._preparing += count
        try:
            yield loaded
        finally:
            self._preparing -= count

    def _check_open(self) -> Loaded:
        self._check_not_draining()
        loaded, state = self._engine.loaded, self._engine.state
        if state is not EngineState.READY or loaded is None:
            self._metrics.refused.labels("503").inc()
            raise unavailable(f"the engine is {state.value}")
        return loaded
