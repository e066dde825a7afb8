"""4-bit blocks of GGUF files as integers with scales, against the gguf package's dequantization."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from chairlift.layers.formats.blocks import BlockWeight
from chairlift.loading.gguf.blocks import GGUFWeight
from chairlift.loading.gguf.checkpoint import Source
from chairlift.loading.gguf.file import GGUFFile
from tests.loading.gguf_writing import finish

ROWS, HEADS = 24, 4


def weight_of(folder: Path, kind: GGMLQuantizationType, heads: int) -> tuple[GGUFWeight, np.ndarray]:
    """A matrix of random blocks, whose scales are finite, and its values in float64."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (ROWS * 512 // block, size), np.uint8)
    raw[:, :4] = random.uniform(0.01, 0.1, (len(raw), 2)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(ROWS, -1)
    writer = GGUFWriter(folder / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    finish(writer)
    file = GGUFFile(folder / "x.gguf")
    values = gguf.quants.dequantize(raw, kind).astype(np.float64)
    if heads:  # a row of a head is stored beside the row half a head further on
        order = [head * 6 + pair * 2 + half for head in range(heads) for half in range(2) for pair in range(3)]
        values = values[order]
    return GGUFWeight(file, Source(file.tensors["x"], interleaved_heads=heads)), values


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("heads", [0, HEADS])
def test_blocks_are_integers_with_scales(kind: str, heads: int, tmp_path: Path) -> None:
    weight, values = weight_of(tmp_path, GGMLQuantizationType[kind], heads)
    assert (weight.kind, tuple(weight.shape)) == (kind, values.shape)
    np.testing.assert_array_equal(weight.dequantized().double().numpy(), values)
    integers = weight.as_integers()
    assert integers is not None
    assert (integers.bits, integers.group_size) == (4, 32)
    np.testing.assert_allclose(integers.dequantized().double().numpy(), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_selected_rows_stay_in_blocks(kind: str, tmp_path: Path) -> None:
    """As families select them that rotate neighbours; the CPU then multiplies all of them as stored."""
    whole, values = weight_of(tmp_path, GGMLQuantizationType[kind], HEADS)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:16]
    some = whole.select_rows(rows).select_rows(torch.arange(15, -1, -1))
    expected = values[rows.flip(0).numpy()]
    assert tuple(some.shape) == expected.shape
    np.testing.assert_array_equal(some.dequantized().double().numpy(), expected)
    integers = some.as_integers()
    assert integers is not None
    np.testing.assert_allclose(integers.dequantized().double().numpy(), expected, rtol=1e-6, atol=1e-7)
    assert BlockWeight.accepts([some], torch.float32, torch.device("cpu"))
    block = BlockWeight.empty(*some.shape, torch.float32, torch.device("cpu"))
    block.load([some])
    np.testing.assert_allclose(block.rows(torch.arange(16)).double().numpy(), expected, rtol=1e-6, atol=1e-5)


def test_other_kinds_have_no_integers(tmp_path: Path) -> None:
    weight, _ = weight_of(tmp_path, GGMLQuantizationType.Q6_K, 0)
    assert weight.as_integers() is None
