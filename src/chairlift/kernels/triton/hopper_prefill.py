"""Paged attention of prompt chunks by the kernel for Hopper (hopper_prefill_kernel.py), and where it can run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chairlift.kernels.triton.attention import LOG2_E, Chunks, Scoring
from chairlift.kernels.triton.hopper_prefill_kernel import COLUMNS, KEYS, ROWS, hopper_prefill_kernel
from chairlift.kernels.triton.launch import next_power_of_2, num_multiprocessors

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)  # tokens
# Items per multiprocessor up to which the device hands them out: a free one gets the next item, which balances short
# lists better than equal shares do. On an H200 334 instead of 290 TFLOP/s with a prompt of 1,024 tokens (32 heads, 8 of
# keys), 468 instead of 438 with 2,048; with longer prompts it is slower, since a program's start is not hidden.
SHORT_LIST = 5
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def obstacles(q: Tensor, keys: Tensor, values: Tensor, tile_queries: int, scoring: Scoring) -> list[str]:
    """Why the kernel cannot compute this layer on Hopper; empty if it can."""
    (_, num_heads, dim), (_, block_size, kv_heads, _) = q.shape, keys.shape
    rows = tile_queries * next_power_of_2(num_heads // kv_heads)
    caches = [side.dtype for side in (keys, values) if side.dtype != q.dtype]
    limits = {
        f"it computes in 16 bits, not in {q.dtype}": q.dtype in (torch.bfloat16, torch.float16),
        f"the cache is in {caches[0] if caches else q.dtype}": not caches,
        f"heads have {dim} numbers, not {_either(HEAD_DIMS)}": dim in HEAD_DIMS,
        f"tiles of queries have {rows} rows, not {ROWS.value}": rows == ROWS.value,
        f"blocks have {block_size} tokens, not {_either(BLOCK_SIZES)}": block_size in BLOCK_SIZES,
        "the cache is not contiguous": keys.is_contiguous() and values.is_contiguous(),
        "attention is limited to a window": scoring.window is None,
        "attention is limited to chunks of positions": scoring.chunk is None,
        "scores are soft-capped": scoring.softcap is None,
    }
    return [reason for reason, met in limits.items() if not met]


def _num_programs(items: int, multiprocessors: int) -> int:
    """One per item of work while they are few, else as many as run at once, which take one item after the other."""
    return items if items <= SHORT_LIST * multiprocessors else multiprocessors


def _either(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"


def hopper_prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, chunks: Chunks, scoring: Scoring
) -> None:
    """Attention of prompt chunks as `prefill_attention` computes it, where `obstacles` finds none."""
    _, num_heads, dim = q.shape
    num_blocks, page, kv_heads, _ = keys.shape
    group = next_power_of_2(num_heads // kv_heads)
    assert chunks.tile_queries * group == ROWS.value
    box = [min(page, KEYS.value), COLUMNS.value]
    described = (
        TensorDescriptor(side, [num_blocks * page, kv_heads * dim], [side.stride(1), 1], box, BOX_LAYOUT)
        for side in (keys, values)
    )
    items = len(chunks.tile_chunk) * kv_heads
    hopper_prefill_kernel[(_num_programs(items, num_multiprocessors(q.device)),)](
        q,
        *described,
        out,
        q if scoring.sinks is None else scoring.sinks,
        *chunks.tensors,
        len(chunks.tile_chunk),
        kv_heads,
        q.stride(0),
        out.stride(0),
        chunks.tables.stride(0),
        scoring.scale * LOG2_E,
        GROUP=num_heads // kv_heads,
        GROUP_PADDED=group,
        D=dim,
        PAGE=page,
        SINKS=scoring.sinks is not None,
        num_warps=4,
    )
