"""Latent attention of single tokens on Hopper: when its kernel (hopper_kernel.py) is used, and its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from chairlift.kernels.triton.attention import LOG2_E, Chunks
from chairlift.kernels.triton.latent.hopper_kernel import BOX, META_PARTS, PANEL, hopper_decode_kernel
from chairlift.kernels.triton.launch import cdiv, hopper_obstacle, next_power_of_2, num_multiprocessors, overlapping

RANK = 512  # latent dimensions: the sums of 16 heads are 128 registers of each thread
HEADS = 16  # A program has this many, the fewest columns for which a tile's copy takes longer than its products.
UNIT, UNITS, ROPE_TILES = 256, 5, 3  # columns and number of the units in shared memory; tiles of rotated parts
REGISTERS = 168  # Each thread has this many: more are not needed, and the warp that copies has them, too.
MOST_ROWS = 2048  # programs times tiles stay below 2 ** 31 with contexts of up to half a million tokens


class HopperScratch:
    """Partial results of rows and their log-sum-exps; all layers of one shape share it."""

    def __init__(self, num_heads: int, rank: int, device: torch.device) -> None:
        self.programs = num_multiprocessors(device)
        assert self.programs < META_PARTS.value
        self.partial = torch.empty(2 * self.programs, num_heads, rank, dtype=torch.float32, device=device)
        self.lse = torch.empty(2 * self.programs, num_heads, dtype=torch.float32, device=device)
        self.meta = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def layer_obstacle(num_heads: int, rank: int, device: torch.device) -> str | None:
    """Why the kernel cannot compute layers of this shape on a device; None if it can."""
    if (reason := hopper_obstacle(device)) is not None:
        return reason
    if num_heads > HEADS:
        return f"it takes at most {HEADS} heads, not {num_heads}"
    if rank != RANK:
        return f"it takes latents of {RANK} dimensions, not {rank}"
    return None


def obstacle(q: Tensor, q_rope: Tensor, cache: Tensor, rows: int) -> str | None:
    """Why the kernel cannot take these tensors (as of `attend_singles`); None if it can."""
    _, num_heads, rank = q.shape
    if (reason := layer_obstacle(num_heads, rank, q.device)) is not None:
        return reason
    if q.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return f"it takes queries and a cache in bfloat16, not {q.dtype} and {cache.dtype}"
    if q_rope.shape[2] != PANEL.value:
        return f"it takes rotated parts of {PANEL.value} dimensions, not {q_rope.shape[2]}"
    if cache.shape[1] % BOX.value:
        return f"it takes blocks of a multiple of {BOX.value} tokens, not {cache.shape[1]}"
    if not cache.is_contiguous():
        return "the cache is not contiguous"
    if rows > MOST_ROWS:
        return f"it takes at most {MOST_ROWS} rows, not {rows}"
    return None


@triton.jit
def _join_parts_kernel(
    out_ptr,  # [T, HEADS, RANK]
    partial_ptr,
    lse_ptr,
    meta_ptr,
    row_count_ptr,
    PER_PROGRAM: tl.constexpr,  # above the number of a row's parts
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the parts of one row, for one head and BD columns, PARTS at a time."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(row_count_ptr + row)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    meta = tl.load(meta_ptr + row)
    num = meta % PER_PROGRAM
    if ((count == 1) & (num > 1)) == 0:
        return
    first = meta // PER_PROGRAM
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    best = float("-inf")
    total = 0.0
    joined = tl.zeros([BD], tl.float32)
    for at in range(0, num, PARTS):
        s = at + tl.arange(0, PARTS)
        # The first part is that of a row's start in its program, the others are those of a program's start.
        slot = (2 * (first + s) + (s == 0).to(tl.int32)) * HEADS + head
        keep = s < num
        lse = tl.load(lse_ptr + slot, mask=keep, other=float("-inf"))
        parts = tl.load(partial_ptr + slot[:, None].to(tl.int64) * RANK + d[None, :], mask=keep[:, None], other=0.0)
        new_best = tl.maximum(best, tl.max(lse))
        weights = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights)
        joined = joined * shrink + tl.sum(parts * weights[:, None], 0)
        best = new_best
    at = out_ptr + (row.to(tl.int64) * HEADS + head) * RANK + d
    tl.store(at, (joined / total).to(out_ptr.dtype.element_ty))


def attend_singles(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    out: Tensor,
    *,
    rows: int,
    chunks: Chunks,
    scale: float,
    scratch: HopperScratch,
) -> None:
    """Attention of the first `rows` rows, all single tokens whose latents are in the cache; as in absorbed.py."""
    _, num_heads, rank = q.shape
    rows_per_block = cache.shape[1]
    described = TensorDescriptor(
        cache,
        [len(cache) * rows_per_block, cache.shape[3]],
        [cache.stride(1), 1],
        [BOX.value, PANEL.value],
        NVMMASharedLayout(128, 16, 2),
    )
    hopper_decode_kernel[(scratch.programs,)](
        described,
        q,
        q_rope,
        out,
        scratch.partial,
        scratch.lse,
        scratch.meta,
        chunks.tables,
        chunks.slot,
        chunks.start,
        chunks.count,
        rows,
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        rows_per_block,
        chunks.tables.stride(0),
        scale * LOG2_E,
        ROWS=max(256, next_power_of_2(rows)),
        HEADS=num_heads,
        BH=HEADS,
        RANK=rank,
        W=UNIT,
        R=UNITS,
        RR=ROPE_TILES,
        BLOCK=cache.shape[1],
        num_warps=4,
        maxnreg=REGISTERS,
        **overlapping(q.device),
    )
    _join(out, rows, chunks, scratch)


def _join(out: Tensor, rows: int, chunks: Chunks, scratch: HopperScratch) -> None:
    _, num_heads, rank = out.shape
    columns, parts = _join_tile(rows, rank)
    _join_parts_kernel[(rows, num_heads, cdiv(rank, columns))](
        out,
        scratch.partial,
        scratch.lse,
        scratch.meta,
        chunks.count,
        PER_PROGRAM=META_PARTS.value,
        HEADS=num_heads,
        RANK=rank,
        PARTS=parts,
        BD=columns,
        num_warps=4,
        **overlapping(out.device),
    )


def _join_tile(rows: int, rank: int) -> tuple[int, int]:
    """Columns of a program that joins parts, and parts at a time. Few rows have many parts each: a program joins few
    columns then. The fastest of 14 on an H200 with 1, 8, 32, 145 and 256 rows; 2 and 16 lie between."""
    if rows <= 2:
        return 64, 128
    return (64, 64) if rows <= 16 else (rank, 8)
