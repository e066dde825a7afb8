"""How the hidden states of a prompt become one vector, as data; the runner computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from chairlift.errors import InvalidParameter


class PoolingKind(StrEnum):
    MEAN = "mean"  # The mean of the hidden states of all prompt tokens.
    LAST = "last"  # the hidden state of the last prompt token


@dataclass(frozen=True, slots=True)
class Pooling:
    """The vector to return for a prompt: an embedding, or with `token_ids` the logits of these tokens after it.

    >>> SamplingParams(max_tokens=0, pooling=Pooling(PoolingKind.LAST, dimensions=256))
    """

    kind: PoolingKind = PoolingKind.MEAN
    dimensions: int | None = None  # keep only as many at the start (matryoshka embeddings), before normalising
    normalize: bool = True  # scale to length 1
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, PoolingKind):
            raise InvalidParameter("pooling", f"must be {' or '.join(PoolingKind)}, got {self.kind!r:.40}")
        if self.dimensions is not None and (isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int)):
            raise InvalidParameter("dimensions", f"must be an integer, got {self.dimensions!r:.40}")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("dimensions", f"must be at least 1, got {self.dimensions}")
        if not isinstance(self.normalize, bool):
            raise InvalidParameter("normalize", f"must be true or false, got {self.normalize!r:.40}")

    @classmethod
    def logits(cls, token_ids: Sequence[int]) -> Pooling:
        """The logits of these tokens after the prompt."""
        return cls(PoolingKind.LAST, normalize=False, token_ids=tuple(token_ids))
