"""The attention of one layer with each backend: one call per request, one padded call, one ragged call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import build_batch
from chairlift.attention.choose import choose_backend
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.common.lengths import SpreadLengths
from chairlift_lab.common.timing import best_seconds

BLOCK_SIZE = 16
LONGEST = 8  # limit of lengths, as a multiple of the mean


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer, its device and dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(0, self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    def modes(self) -> list[str]:
        """The backends that support it; the one that the engine would choose comes first."""
        ordered = sorted(BACKENDS.names(), key=lambda name: -BACKENDS.get(name).preference)
        return [name for name in ordered if not self._refuses(name)]

    def _refuses(self, name: str) -> bool:
        try:
            self.backend(name)
        except InvalidParameter:
            return True
        return False

    def backend(self, name: str) -> AttentionBackend:
        return choose_backend(name, [self.layer], self.device, self.dtype)

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class ModesPoint:
    """One batch, computed in each mode."""

    kind: str  # decode: one token per request; mixed: the last request computes a prompt
    batch: int
    variation: float  # of the context lengths
    tokens: int  # without padding
    padding: int  # additional tokens of the padded mode
    context: int  # cached positions of all requests
    padded_context: int  # positions that the padded mode reads
    seconds: dict[str, float]  # of one layer's attention, by mode


def compare_modes(
    shape: AttentionShape,
    *,
    batches: Sequence[int],
    variations: Sequence[float],
    context: int,
    prompt: int,
    seed: int = 0,
    note: Note = lambda text: None,
) -> list[ModesPoint]:
    """Decoding batches, and mixed ones in which the last request computes a prompt of `prompt` tokens."""
    points = []
    for kind in ("decode", "mixed"):
        for variation in variations:
            for batch in batches:
                note(f"{kind}, {batch} requests, length variation {variation:g}")
                lengths = SpreadLengths(context, variation, LONGEST * context)
                source = random.Random(f"{seed} {batch} {variation}")
                spans = [(length - 1, 1) for length in (lengths.draw(source) for _ in range(batch))]
                if kind == "mixed":
                    spans[-1] = (0, prompt)
                points.append(_point(shape, kind, variation, spans))
    return points


def _point(shape: AttentionShape, kind: str, variation: float, spans: Sequence[tuple[int, int]]) -> ModesPoint:
    ends = [start + count for start, count in spans]
    tokens = sum(count for _, count in spans)
    return ModesPoint(
        kind=kind,
        batch=len(spans),
        variation=variation,
        tokens=tokens,
        padding=len(spans) * max(count for _, count in spans) - tokens,
        context=sum(ends),
        padded_context=len(spans) * max(ends),
        seconds=time_modes(shape, spans),
    )


def time_modes(shape: AttentionShape, spans: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds per mode for a batch of (start, count): a request with `start` cached tokens that computes `count`."""
    plan, num_blocks = plan_of(spans)
    storage = random_storage(shape, num_blocks)
    return {name: _time_backend(shape, name, plan, storage) for name in shape.modes()}


def plan_of(spans: Sequence[tuple[int, int]]) -> tuple[StepPlan, int]:
    """A step that computes `count` tokens after `start` cached ones for each request, and the blocks it takes."""
    chunks, used = [], 0
    for index, (start, count) in enumerate(spans):
        needed = -(-(start + count) // BLOCK_SIZE)
        request = Request(f"{index}", [0] * (start + count), SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunks.append(Chunk(request, start, count, range(used, used + needed), samples=True))
        used += needed
    return StepPlan(0, tuple(chunks)), used


def random_storage(shape: AttentionShape, num_blocks: int) -> KVStorage:
    size = (num_blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    return KVStorage([shape.random(*size)], [shape.random(*size)])


def _time_backend(shape: AttentionShape, name: str, plan: StepPlan, storage: KVStorage) -> float:
    backend = shape.backend(name)
    batch = build_batch(plan, storage, shape.device, rectangular=backend.capabilities.rectangular)
    # Planned once for all layers of a model, so planning is not part of a layer's cost.
    attend = backend.begin(batch, storage)
    rows = len(batch.tokens)
    q = shape.random(rows, shape.heads, shape.head_dim)
    k, v = (shape.random(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
    return best_seconds(lambda: attend.attend(shape.layer, q, k, v), shape.device)
