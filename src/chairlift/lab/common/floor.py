"""The floor: the least time that a device needs for a workload with these weights and this KV cache.

Every step reads every weight once (of a mixture of experts, those of one token). Every generated token reads the keys
and values before it once. Every prompt token is multiplied with every weight (of a mixture, with its own experts'),
except those of the last layer after its attention, whose result is not used. Reading and arithmetic do not overlap.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.lab.common.timing import best_seconds
from chairlift.layers.formats import FORMATS
from chairlift.layers.linear import Linear
from chairlift.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured bandwidth and arithmetic of a device."""

    bytes_per_second: float  # of a large copy, both ways, or of reading alone where measured
    flops_per_second: float  # in a large matrix product

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Ceilings:
        """With a large copy and a large product in the format of the model's weights."""
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
        from chairlift.lab.common.cpu_ceilings import cpu_ceilings

        return cpu_ceilings(model.dtype, quantization)
    return Ceilings.measure(model.device, model.dtype, quantization)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What the tokens of a model cost."""

    step_bytes: int  # weights that every step reads
    token_flops: int  # of a prompt token through the layers; the last layer only stores its keys and values
    kv_bytes: int  # keys and values of one token


def floor_seconds(prompts: Sequence[int], outputs: Sequence[int], cost: ModelCost, ceilings: Ceilings) -> float:
    """The floor for requests with prompts and outputs of these lengths, all sent at once."""
    steps = max(outputs)
    # Output token i (from 0) reads the prompt and i tokens, its input included; the first one comes with the prompt.
    reads = sum(prompt * (count - 1) + count * (count - 1) // 2 for prompt, count in zip(prompts, outputs, strict=True))
    moved = steps * cost.step_bytes + reads * cost.kv_bytes
    return moved / ceilings.bytes_per_second + sum(prompts) * cost.token_flops / ceilings.flops_per_second
