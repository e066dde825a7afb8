"""What the parts of a step have to read and to compute, counted from the shapes of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from chairlift.attention.base import AttentionLayer
from chairlift.core.plan import StepPlan
from chairlift.layers.linear import Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder

GEMM, ATTENTION, SAMPLING = "GEMM", "attention", "sampling"


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Activations are not counted: they stay in the caches."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(self.flops + other.flops, self.bytes + other.bytes)

    def __truediv__(self, number: float) -> KernelWork:
        return KernelWork(self.flops / number, self.bytes / number)


def step_work(model: CausalLM, kv_itemsize: int, plan: StepPlan) -> Mapping[str, KernelWork]:
    """By part of the step; only what can be counted is there."""
    rows, sampled = plan.num_tokens, sum(chunk.num_scored for chunk in plan.chunks)
    spans = [(chunk.start, chunk.count) for chunk in plan.chunks]
    parts = {
        ATTENTION: total(attention_work(layer, spans, kv_itemsize) for layer in model.attention_layers),
        SAMPLING: KernelWork(0.0, 4.0 * sampled * model.vocab_size),
    }
    if isinstance(model, Decoder):
        parts[GEMM] = total(products(model, rows, sampled)) + linear_work(model.head, sampled)
    return parts


def total(parts: Iterable[KernelWork]) -> KernelWork:
    return sum(parts, KernelWork())


def products(model: Decoder, rows: int, sampled: int) -> Iterator[KernelWork]:
    """Those of the layers; the last one ends with the rows that are sampled from (unless a network guesses, which reads
    all: not counted)."""
    for layer in model.layers:
        yield linear_work(layer.attention.qkv, rows)
        if layer is model.layers[-1]:
            rows = sampled
        yield linear_work(layer.attention.output, rows)
        if isinstance(layer.mlp, MixtureOfExperts):
            assert layer.experts is not None
            yield _experts_work(layer.mlp, layer.experts.top_k, rows)
        else:
            yield linear_work(layer.mlp.gate_up, rows)
            yield linear_work(layer.mlp.down, rows)


def linear_work(linear: Linear, rows: int) -> KernelWork:
    """Every weight is read once, however many rows there are."""
    return KernelWork(2.0 * rows * linear.in_features * linear.out_features, linear_bytes(linear) if rows else 0.0)


def linear_bytes(linear: Linear) -> int:
    return linear.weight.num_bytes


def _experts_work(experts: MixtureOfExperts, top_k: int, rows: int) -> KernelWork:
    count = len(experts.gate_up)
    numbers = (experts.gate_up.numel() + experts.down.numel()) / count
    # At most so many experts are asked; which ones, only the tokens know.
    asked = min(count, rows * top_k)
    return KernelWork(2.0 * rows * top_k * numbers, asked * numbers * experts.gate_up.itemsize) + linear_work(
        experts.router, rows
    )


def attention_work(layer: AttentionLayer, spans: Iterable[tuple[int, int]], kv_itemsize: int) -> KernelWork:
    """For sequences that compute `count` tokens after `start` cached ones."""
    pairs = read = 0
    for start, count in spans:
        pairs += _visible_pairs(start, count, layer.window)
        read += min(start + count, count + (layer.window or start + count))
    numbers = layer.num_heads * layer.head_dim
    return KernelWork(4.0 * pairs * numbers, 2.0 * read * layer.num_kv_heads * layer.head_dim * kv_itemsize)


def _visible_pairs(start: int, count: int, window: int | None) -> int:
    """How many positions the tokens at [start, start + count) see together, themselves included."""
    if window is None or start + count <= window:
        return count * start + count * (count + 1) // 2
    return sum(min(position + 1, window) for position in range(start, start + count))
