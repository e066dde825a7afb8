"""The least time that a device needs for a workload: what no engine can beat with these weights and this cache.

Every step reads every weight once (of a mixture, the experts of one token: which others are asked, only the tokens
know), every generated token reads the keys and values before it once, and every prompt token is multiplied with every
weight (of a mixture, with its own experts'), but for those of the last layer after its attention, where nobody reads
the result. Reading and arithmetic are not assumed to overlap.
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
    """What a device can do, measured on it."""

    bytes_per_second: float  # read and written together in a large copy, or read where that can be measured by itself
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
    """Of the device that this model runs on, in its precision."""
    quantization = getattr(model, "quantization", "none")
    if model.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from chairlift.lab.common.cpu_ceilings import cpu_ceilings

        return cpu_ceilings(model.dtype, quantization)
    return Ceilings.measure(model.device, model.dtype, quantization)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's tokens cost."""

    step_bytes: int  # weights that every step reads
    token_flops: int  # of one token of a prompt through the layers, of which the last only has to keep it
    kv_bytes: int  # keys and values of one token


def floor_seconds(prompts: Sequence[int], outputs: Sequence[int], cost: ModelCost, ceilings: Ceilings) -> float:
    """For requests with prompts and outputs of these lengths, all sent at once."""
    steps = max(outputs)
    # To choose the token at place i of an output, the i-th one looks at the prompt and at i tokens, itself included;
    # the first is chosen with the prompt.
    reads = sum(prompt * (count - 1) + count * (count - 1) // 2 for prompt, count in zip(prompts, outputs, strict=True))
    moved = steps * cost.step_bytes + reads * cost.kv_bytes
    return moved / ceilings.bytes_per_second + sum(prompts) * cost.token_flops / ceilings.flops_per_second
