"""The floor: the least time that a device needs for a workload with these weights and this KV cache.

Every step reads every weight once; of a mixture, the experts that its tokens use, if every choice of experts is equally
likely (with random weights it nearly is). Every generated token reads the keys and values before it once (in layers
with a window, those in it), and reads and writes the states of recurrent layers. Every prompt token is multiplied with
every weight (of a mixture, with its own experts'), except those of the last layer after its attention, whose result is
not used. Reading and arithmetic do not overlap.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.core.plan import StepPlan
from chairlift_lab.common.timing import best_seconds

if TYPE_CHECKING:
    import torch

    from chairlift.attention.interface import AttentionLayer
    from chairlift.engine.startup import StartedEngine
    from chairlift.layers.linear import Linear
    from chairlift.layers.moe import MixtureOfExperts
    from chairlift.models.base import CausalLM
    from chairlift.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured bandwidth and arithmetic of a device."""

    bytes_per_second: float  # A large copy, both ways, or reading alone where measured.
    flops_per_second: float  # A large matrix product.

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Ceilings:
        """With a large copy and a large product in the format of the model's weights."""
        import torch

        from chairlift.layers.formats import FORMATS
        from chairlift.layers.linear import Linear

        count, size = (2**31, 8192) if device.type == "cuda" else (2**26, 1024)
        source = torch.empty(count, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        copied = 2 * count / best_seconds(lambda: target.copy_(source), device)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        linear = Linear(b, format=FORMATS.get(quantization))
        linear.finalize()
        return cls(copied, 2 * size**3 / best_seconds(lambda: linear(a), device))


def ceilings_for(model: CausalLM) -> Ceilings:
    """The ceilings of the model's device in the model's precision."""
    quantization = getattr(model, "quantization", "none")
    if model.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from chairlift_lab.common.cpu_kernels import cpu_ceilings

        return cpu_ceilings(model.dtype, quantization)
    return Ceilings.measure(model.device, model.dtype, quantization)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer."""

    count: int
    per_token: int
    expert_bytes: float

    def read_bytes(self, tokens: int) -> float:
        """The bytes of the experts that this number of tokens uses, on average."""
        unused = (1.0 - self.per_token / self.count) ** tokens
        return self.count * (1.0 - unused) * self.expert_bytes


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the tokens of a model cost."""

    step_bytes: int  # weights that every step reads, experts aside
    token_flops: int  # A prompt token; the last layer only stores keys and values.
    kv_bytes: int  # keys and values of one token
    window_bytes: Mapping[int, int] = field(default_factory=dict)  # those of layers with a window, by its size
    state_bytes: int = 0  # The states of recurrent layers, for one sequence.
    mixtures: Sequence[Mixture] = ()

    def weight_bytes(self, tokens: int) -> float:
        """The weights that a step of this number of tokens reads."""
        return self.step_bytes + sum(mixture.read_bytes(tokens) for mixture in self.mixtures)

    def read_bytes(self, first: int, last: int) -> int:
        """What tokens read of the KV cache whose contexts have `first`, `first` + 1, ... `last` tokens."""
        beyond = (_sum(max(1, first - window), last - window) * size for window, size in self.window_bytes.items())
        return _sum(first, last) * self.kv_bytes - sum(beyond)


def floor_seconds(prompts: Sequence[int], outputs: Sequence[int], cost: ModelCost, ceilings: Ceilings) -> float:
    """The floor for requests with prompts and outputs of these lengths, all sent at once."""
    # Output token i (from 0) reads the prompt and i tokens, its input included; the first one comes with the prompt.
    reads = sum(cost.read_bytes(prompt + 1, prompt + count - 1) for prompt, count in zip(prompts, outputs, strict=True))
    states = 2 * cost.state_bytes * sum(count - 1 for count in outputs)
    weights = sum(cost.weight_bytes(sum(count > step for count in outputs)) for step in range(max(outputs)))
    moved = weights + reads + states
    return moved / ceilings.bytes_per_second + sum(prompts) * cost.token_flops / ceilings.flops_per_second


def _sum(first: int, last: int) -> int:
    """The sum of the numbers from `first` to `last`."""
    return (first + last) * (last - first + 1) // 2 if last >= first else 0


# ---- memory traffic and arithmetic of the parts of a step, from the shapes of the model -----------------------------

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
    from chairlift.models.decoder import Decoder

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
    from chairlift.models.decoder import Decoder

    model, keys = started.runner.model, started.runner.storage.keys
    dtype = keys[0].dtype if keys else model.dtype
    windows: dict[int, int] = {}
    for layer in model.attention_layers:
        window = layer.window or layer.chunk  # At most this number of positions of a chunk is read.
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
    mixtures = [_mixture(layer.mixture) for layer in model.layers if layer.mixture is not None]
    others = step.bytes + model.head.weight.num_bytes - sum(mixture.read_bytes(1) for mixture in mixtures)
    return ModelCost(round(others), int(prompt_token.flops), **moved, mixtures=mixtures)


def linear_work(linear: Linear, rows: int) -> KernelWork:
    """Every weight is read once, for any number of rows."""
    return KernelWork(2.0 * rows * linear.in_features * linear.out_features, linear.weight.num_bytes if rows else 0.0)


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
