"""Memory traffic and arithmetic of the parts of a step, from the shapes of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.attention.interface import AttentionLayer
from chairlift.core.plan import StepPlan
from chairlift.layers.linear import Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift_lab.common.floor import Mixture, ModelCost

if TYPE_CHECKING:
    from chairlift.engine.startup import StartedEngine

GEMM, ATTENTION, SAMPLING = "GEMM", "attention", "sampling"


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Arithmetic and memory traffic; activations are not counted because they stay in caches."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(self.flops + other.flops, self.bytes + other.bytes)

    def __truediv__(self, number: float) -> KernelWork:
        return KernelWork(self.flops / number, self.bytes / number)


def step_work(model: CausalLM, kv_itemsize: float, plan: StepPlan) -> Mapping[str, KernelWork]:
    """The work of each part of a step; parts that cannot be counted are missing."""
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
    """The matrix products of the layers.

    The last layer ends with the rows that are sampled (a draft head, which reads all rows, is not counted).
    """
    for layer in model.layers:
        outputs = {id(mixer.output) for mixer in layer.mixers}
        inputs = [linear for mixer in layer.mixers for linear in mixer.linears() if id(linear) not in outputs]
        yield from (linear_work(linear, rows) for linear in inputs)
        if layer.latent is not None:
            weight = layer.latent.up.weight  # multiplied with queries and with sums of latents
            yield KernelWork(2.0 * rows * weight.numel(), weight.nbytes)
        if layer is model.layers[-1]:
            rows = sampled
        yield from (linear_work(mixer.output, rows) for mixer in layer.mixers)
        if layer.mixture is not None:
            yield _experts_work(layer.mixture, rows)
        elif layer.dense is not None:
            yield linear_work(layer.dense.first, rows)
            yield linear_work(layer.dense.down, rows)


def model_cost(started: StartedEngine) -> ModelCost:
    from chairlift.engine.memory_plan import bytes_per_token

    model, keys = started.runner.model, started.runner.storage.keys
    dtype = keys[0].dtype if keys else model.dtype
    windows: dict[int, int] = {}
    for layer in model.attention_layers:
        window = layer.window or layer.chunk  # At most so many positions of a chunk are read.
        if window:
            windows[window] = windows.get(window, 0) + bytes_per_token([layer], dtype)
    moved: dict[str, Any] = {
        "kv_bytes": bytes_per_token(model.attention_layers, dtype),
        "window_bytes": windows,
        "state_bytes": sum(layer.num_bytes for layer in model.recurrent_layers),
    }
    if not isinstance(model, Decoder):
        weights = model.num_weight_bytes()
        return ModelCost(weights, 2 * (weights // model.dtype.itemsize), **moved)
    # An embedding lookup reads one row; a head that shares the matrix reads all of it.
    step, prompt_token = total(products(model, 1, sampled=1)), total(products(model, 1, sampled=0))
    mixtures = mixtures_of(model)
    others = step.bytes + linear_bytes(model.head) - sum(mixture.read_bytes(1) for mixture in mixtures)
    return ModelCost(round(others), int(prompt_token.flops), **moved, mixtures=mixtures)


def linear_work(linear: Linear, rows: int) -> KernelWork:
    """Every weight is read once, for any number of rows."""
    return KernelWork(2.0 * rows * linear.in_features * linear.out_features, linear_bytes(linear) if rows else 0.0)


def linear_bytes(linear: Linear) -> int:
    return linear.weight.num_bytes


def mixtures_of(model: Decoder) -> list[Mixture]:
    """The mixtures of experts of a model, one for each layer that has one."""
    return [_mixture(layer.mixture) for layer in model.layers if layer.mixture is not None]


def _mixture(experts: MixtureOfExperts) -> Mixture:
    count = experts.gate_up.shape[0]
    stored = experts.gate_up.num_bytes + experts.down.num_bytes
    return Mixture(count, experts.router.routing.top_k, stored / count)


def _experts_work(experts: MixtureOfExperts, rows: int) -> KernelWork:
    mixture = _mixture(experts)
    numbers = (experts.gate_up.shape.numel() + experts.down.shape.numel()) / mixture.count
    routed = KernelWork(2.0 * rows * mixture.per_token * numbers, mixture.read_bytes(rows))
    return routed + total(linear_work(linear, rows) for linear in experts.linears())


def attention_work(layer: AttentionLayer, spans: Iterable[tuple[int, int]], kv_itemsize: float) -> KernelWork:
    """The attention of one layer, for sequences that compute `count` tokens after `start` cached ones."""
    pairs = read = 0
    for start, count in spans:
        if layer.chunk is not None:
            pairs += sum(position % layer.chunk + 1 for position in range(start, start + count))
            read += start % layer.chunk + count
            continue
        pairs += _visible_pairs(start, count, layer.window)
        read += min(start + count, count + (layer.window or start + count))
    numbers = layer.num_heads * (layer.head_dim + layer.value_dim)
    return KernelWork(2.0 * pairs * numbers, float(read * layer.numbers_per_token * kv_itemsize))


def _visible_pairs(start: int, count: int, window: int | None) -> int:
    """How many positions the tokens at [start, start + count) see together, themselves included."""
    if window is None or start + count <= window:
        return count * start + count * (count + 1) // 2
    return sum(min(position + 1, window) for position in range(start, start + count))
