"""The least time that a device needs for a workload: what no engine can beat with these weights and this cache.

Every step reads every weight once, every generated token reads the keys and values before it once, and every prompt
token is multiplied with every weight. Reading and arithmetic are not assumed to overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.bench.timing import best_seconds


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device can do, measured on it."""

    bytes_per_second: float  # read and written together, in a large copy
    flops_per_second: float  # in a large matrix product

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        count, size = (2**31, 8192) if device.type == "cuda" else (2**26, 1024)
        source = torch.empty(count, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        copied = 2 * count / best_seconds(lambda: target.copy_(source), device)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return cls(copied, 2 * size**3 / best_seconds(lambda: a @ b, device))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's tokens cost."""

    step_bytes: int  # weights that every step reads
    token_flops: int  # of one token through the layers
    kv_bytes: int  # keys and values of one token


def floor_seconds(prompts: Sequence[int], outputs: Sequence[int], cost: ModelCost, ceilings: Ceilings) -> float:
    """For requests with prompts and outputs of these lengths, all sent at once."""
    steps = max(outputs)
    # To choose the token at place i of an output, the i-th one looks at the prompt and at i tokens, itself included;
    # the first is chosen with the prompt.
    reads = sum(prompt * (count - 1) + count * (count - 1) // 2 for prompt, count in zip(prompts, outputs, strict=True))
    moved = steps * cost.step_bytes + reads * cost.kv_bytes
    return moved / ceilings.bytes_per_second + sum(prompts) * cost.token_flops / ceilings.flops_per_second
