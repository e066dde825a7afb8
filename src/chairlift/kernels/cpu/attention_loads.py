"""Loads keys and values of a sequence through its block table into tiles of float32."""

from __future__ import annotations

from typing import Any

from chairlift.kernels.cpu.scalar_math import FAST, compiled, widen
from chairlift.kernels.cpu.simd import transpose_16, widen_row


@compiled(FAST)
def load_rows(
    side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, width: int, target: Any
) -> None:
    """Load `count` positions, the first `width` numbers of each, into target [positions, width]."""
    like, size, head_dim, block_size = side[0, 0, 0, 0], side.itemsize, side.shape[3], side.shape[1]
    whole = width // 16 * 16
    j = 0
    while j < count:
        block, slot = tables[sequence, (base + j) // block_size], (base + j) % block_size
        for at in range(slot, min(block_size, slot + count - j)):
            source = side.ctypes.data + (((block * block_size + at) * side.shape[2] + kv_head) * head_dim) * size
            widen_row(target.ctypes.data + j * target.shape[1] * 4, source, whole, like)
            for i in range(whole, width):
                target[j, i] = widen(side[block, at, kv_head, i])
            j += 1


@compiled(FAST)
def load_columns(side: Any, tables: Any, sequence: int, base: int, count: int, kv_head: int, target: Any) -> None:
    """Like `load_rows` with all numbers of a head, transposed: target [head_dim, positions]."""
    like, size, head_dim, block_size = side[0, 0, 0, 0], side.itemsize, side.shape[3], side.shape[1]
    whole, stride = head_dim // 16 * 16, side.shape[2] * head_dim
    j = 0
    while j < count:
        block, slot = tables[sequence, (base + j) // block_size], (base + j) % block_size
        run = min(block_size - slot, count - j)
        start = side.ctypes.data + (((block * block_size + slot) * side.shape[2] + kv_head) * head_dim) * size
        squares = run // 16 * 16
        for at in range(0, squares, 16):
            for i in range(0, whole, 16):
                to = target.ctypes.data + (i * target.shape[1] + j + at) * 4
                transpose_16(to, target.shape[1], start + (at * stride + i) * size, stride, like)
        for at in range(run):
            for i in range(whole if at < squares else 0, head_dim):
                target[i, j + at] = widen(side[block, slot + at, kv_head, i])
        j += run
