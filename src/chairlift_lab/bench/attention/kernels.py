"""Tiling instead of a score matrix, and heads that share keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.engine.memory_plan import bytes_per_token, plan_memory
from chairlift.progress import Note
from chairlift.runner.device_memory import free_memory
from chairlift_lab.bench.attention.modes import BLOCK_SIZE, AttentionShape, time_modes
from chairlift_lab.common.timing import best_seconds, peak_bytes

KV_MEMORY = 2**30  # for comparing how many sequences fit


@dataclass(frozen=True, slots=True)
class TilingPoint:
    """Attention over a prompt of `tokens`, tiled and with the full score matrix (None: too large)."""

    tokens: int
    tiled_seconds: float
    full_seconds: float | None
    tiled_bytes: int | None  # peak, besides the inputs
    full_bytes: int | None


def compare_tiling(shape: AttentionShape, *, sizes: Sequence[int], note: Note = lambda text: None) -> list[TilingPoint]:
    """Causal attention of one sequence: torch's FlashAttention-style kernel and the plain formula."""
    points = []
    for size in sizes:
        note(f"tiled and materialised, {size} tokens")
        q, k, v = (shape.random(1, shape.heads, size, shape.head_dim) for _ in range(3))

        def tiled(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def full(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return materialised(q, k, v)

        matrices = 3 * shape.heads * size**2 * shape.dtype.itemsize  # scores, masked scores, weights: at most
        fits = matrices < 0.9 * free_memory(shape.device)
        points.append(
            TilingPoint(
                size,
                best_seconds(tiled, shape.device, repeats=3),
                best_seconds(full, shape.device, repeats=3) if fits else None,
                peak_bytes(tiled, shape.device),
                peak_bytes(full, shape.device) if fits else None,
            )
        )
    return points


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d, masked)·v with every score in memory. All [1, heads, tokens, d]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    attended: Tensor = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ v
    return attended


@dataclass(frozen=True, slots=True)
class SharingPoint:
    """A decoding batch in which `kv_heads` serve all query heads."""

    name: str  # MHA, GQA, MQA
    kv_heads: int
    bytes_per_token: int  # keys and values of one layer
    decode_seconds: float
    largest_batch: int  # sequences of this context that fit in KV_MEMORY


def compare_head_sharing(
    shape: AttentionShape, *, group: int, batch: int, context: int, note: Note = lambda text: None
) -> list[SharingPoint]:
    """MHA, GQA with `group` query heads per KV head, and MQA."""
    points = []
    for name, kv_heads in (("MHA", shape.heads), ("GQA", shape.heads // group), ("MQA", 1)):
        note(f"{name}, {batch} requests of {context} tokens")
        one = replace(shape, kv_heads=kv_heads)
        seconds = time_modes(one, [(context - 1, 1)] * batch)
        memory = plan_memory(
            [one.layer],
            weight_bytes=0,
            kv_memory=KV_MEMORY,
            dtype=one.dtype,
            device=one.device,
            block_size=BLOCK_SIZE,
            max_model_len=context,
            max_batch_requests=1,
        )
        points.append(
            SharingPoint(
                name=name,
                kv_heads=kv_heads,
                bytes_per_token=bytes_per_token([one.layer], one.dtype),
                decode_seconds=seconds[one.modes()[0]],
                largest_batch=memory.num_blocks // -(-context // BLOCK_SIZE),
            )
        )
    return points
