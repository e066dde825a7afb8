"""Who may come in: limits, and a place for every completion before any work is done for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chairlift.errors import InvalidParameter
from chairlift.server.http.errors import APIError, unavailable
from chairlift.server.limits import Limits
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.process.messages import Loaded


class Admission:
    def __init__(self, engine: EngineClient, metrics: Metrics, limits: Limits) -> None:
        self.draining = False  # shutting down: nobody comes in any more
        self._engine = engine
        self._metrics = metrics
        self._limits = limits
        self._preparing = 0  # completions that have a place but are not with the engine yet
        self._text_jobs = 0

    @contextmanager
    def places(self, num_prompts: int, n: int) -> Iterator[Loaded]:
        """Places for the completions of one request while it is read and prepared; the engine counts them from then
        on."""
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

    @contextmanager
    def text_place(self) -> Iterator[None]:
        """A place for a text that is only read, tokenised or detokenised. The engine is not needed for that."""
        self._check_not_draining()
        if self._text_jobs >= self._limits.max_text_jobs:
            self._metrics.refused.labels("429").inc()
            raise too_busy("too many texts are being tokenised; try again in a moment")
        self._text_jobs += 1
        try:
            yield
        finally:
            self._text_jobs -= 1

    def _check_open(self) -> Loaded:
        self._check_not_draining()
        loaded, state = self._engine.loaded, self._engine.state
        if state is not EngineState.READY or loaded is None:
            self._metrics.refused.labels("503").inc()
            raise unavailable(f"the engine is {state.value}")
        return loaded

    def _check_not_draining(self) -> None:
        if self.draining:
            self._metrics.refused.labels("503").inc()
            raise unavailable("the server is shutting down")


def too_busy(message: str) -> APIError:
    return APIError(429, message, type_="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})


def check_lengths(parameter: str, prompts: Sequence[Sequence[int]], limit: int) -> None:
    """The engine would say so too, but all others would wait while it reads millions of tokens."""
    longest = max(map(len, prompts))
    if longest >= limit:
        problem = f"has {longest} tokens, but at most {limit - 1} leave room for an answer"
        raise InvalidParameter(parameter, f"{problem} (max_model_len is {limit})")
