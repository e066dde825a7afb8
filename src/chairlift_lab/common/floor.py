"""The floor: the least time that a device needs for a workload with these weights and this KV cache.

Every step reads every weight once; of a mixture, the experts that its tokens use, if every choice of experts is equally
likely (with random weights it nearly is). Every generated token reads the keys and values before it once (in layers
with a window, those in it), and reads and writes the states of recurrent layers. Every prompt token is multiplied with
every weight (of a mixture, with its own experts'), except those of the last layer after its attention, whose result is
not used. Reading and arithmetic do not overlap.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chairlift_lab.common.timing import best_seconds

if TYPE_CHECKING:
    import torch

    from chairlift.models.base import CausalLM


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
        """The bytes of the experts that so many tokens use, on average."""
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
        """The weights that a step of so many tokens reads."""
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
