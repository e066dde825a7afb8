"""Rounding to the blocks of GGUF files, read back by the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from chairlift.kernels.cpu.blocks.panels import KINDS
from chairlift_lab.make_model import encode


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("E2M1")])  # These are of no file.
def test_blocks_stand_for_nearly_the_same_numbers(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    rows[2] = 0
    rows[3] *= 1e-3
    rows[4] = np.abs(rows[4])
    blocks = encode(kind, rows)
    assert blocks.shape == (6, 512 // KINDS[kind].columns * KINDS[kind].num_bytes)
    found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    spread = np.abs(found - rows).max(axis=1) / np.maximum(np.abs(rows).max(axis=1), 1e-9)
    assert spread.max() < 1.3 / 2 ** (KINDS[kind].bits - 1)
    assert not found[2].any()
