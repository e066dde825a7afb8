"""Random blocks of GGUF files: all numbers occur, and weights are as large as those of a fresh model."""

from __future__ import annotations

import numpy as np

from chairlift.kernels.cpu.blocks.kinds import KINDS, BlockKind

# Bytes at which a block has its float16 factor, and that of its minima.
_FACTOR_AT = {"Q6_K": 208}
_MIN_FACTOR_AT = 2


def random_blocks(kind: BlockKind, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """[rows, bytes] of weights with the standard deviation 1 / sqrt(columns)."""
    blocks = np.frombuffer(random.bytes(rows * columns // kind.columns * kind.num_bytes), dtype=np.uint8)
    blocks = blocks.reshape(-1, kind.num_bytes).copy()
    scale = _set_scales(kind, blocks)
    values = np.array(kind.values or range(2**kind.bits), dtype=np.float64)
    factor = 1 / (np.sqrt(columns) * scale * values.std())
    _put(blocks, _FACTOR_AT.get(kind.name, 0), factor)
    if kind.has_min:  # centres the numbers
        low = factor * values.mean() * (1 if kind.nested else -1)
        _put(blocks, _MIN_FACTOR_AT, low)
    return blocks.reshape(rows, -1)


def _set_scales(kind: BlockKind, blocks: np.ndarray) -> float:
    """Give nested scales a middle value; returns it."""
    if not kind.nested:
        return 1.0
    if kind.name == "Q6_K":
        blocks[:, 192:208] = 64
        return 64.0
    if kind.name == "IQ4_XS":  # six bits in two places: 16 + 32 stands for 16
        blocks[:, 2:4] = 0xFF
        blocks[:, 4:8] = 0
        return 16.0
    blocks[:, 4:12] = 32  # the first four scales and minima of six bits
    blocks[:, 4:12] |= 0x80  # the upper bits of the others
    blocks[:, 12:16] = 0
    return 32.0


def _put(blocks: np.ndarray, at: int, factor: float) -> None:
    blocks[:, at : at + 2] = np.array([factor], dtype=np.float16).view(np.uint8)


def random_matrix(name: str, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    return random_blocks(KINDS[name], rows, columns, random)
