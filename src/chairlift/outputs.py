"""Results of the offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.errors import ChairliftError


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, and its rank in the vocabulary."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds on the engine's clock."""

    arrival: float
    boarded: float | None = None  # time of the first admission
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    preemptions: int = 0

    @property
    def queued(self) -> float | None:
        """Seconds in the queue before the first step."""
        return None if self.boarded is None else self.boarded - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def inter_token(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def end_to_end(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length, cancelled, deadline, error
    stop_reason: int | str | None = None  # the stop token id or stop string, or the message of an error
    score: float | None = None  # set by beam search and best_of


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token, which nothing precedes
    vector: list[float] | None = None  # with pooling

    def require_vector(self) -> list[float]:
        """The pooled vector; raises if the request ended without one."""
        if self.vector is None:
            raise ChairliftError(f"the request ended early: {self.outputs[0].finish_reason}")
        return self.vector

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair of texts."""

    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class StreamedText:
    """A piece of one completion, as it is generated."""

    prompt_index: int
    completion_index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
