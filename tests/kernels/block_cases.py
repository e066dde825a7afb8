"""Random blocks of every kind, and the check of a product with them; also run by itself with other instructions."""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from chairlift.kernels.cpu.blocks.panels import COLUMNS, KINDS, BlockKind, pack, unpack
from chairlift.kernels.cpu.blocks.product import ISA, MOST_ROWS, PanelWeight, linear_panels
from chairlift.kernels.cpu.blocks.rows import OUTLIER, BlockRows
from chairlift.kernels.cpu.threads import the_team
from chairlift.loading.stored_weight import E2M1_VALUES

FACTORS = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "E2M1_16": (0, 2),
}  # places of float16 numbers
ROW_COUNTS = [*range(1, MOST_ROWS + 6), 200]


def random_rows(kind: BlockKind, rows: int, depth: int, seed: int = 0) -> np.ndarray:
    """Rows of a file with all numbers and scales that occur."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, depth // kind.columns, kind.num_bytes), dtype=np.uint8)
    for place in FACTORS.get(kind.name, (0,)):
        factors = (random.normal(size=blocks.shape[:2]) / 100).astype(np.float16)
        blocks[:, :, place : place + 2] = factors[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def reference(kind: BlockKind, rows: np.ndarray) -> np.ndarray:
    if kind.name.startswith("E2M1"):
        return small_floats(kind, rows)
    return dequantize(rows, GGMLQuantizationType[kind.name])


def small_floats(kind: BlockKind, rows: np.ndarray) -> np.ndarray:
    """The values of 4-bit floats, whose scales are stored as halves of them."""
    blocks = rows.reshape(len(rows), -1, kind.num_bytes)
    size = kind.num_bytes - 16
    scales = blocks[..., :size].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[..., size:] & 15, blocks[..., size:] >> 4], axis=-1).astype(np.int64)
    values = np.array(E2M1_VALUES, dtype=np.float32)[codes] * 2
    return (values * scales.repeat(kind.scale_columns, axis=-1)).reshape(len(rows), -1)


def multiply(x: np.ndarray, weight: PanelWeight, channels: int, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), channels), np.nan, dtype=np.float32)
    rows = BlockRows.empty(*x.shape)
    bias = np.empty(0, dtype=np.float32) if bias is None else bias
    the_team().run(linear_panels, x, rows, weight, bias, out)
    return out


def rounded(x: np.ndarray) -> np.ndarray:
    """The activations as the product reads them, in float64."""
    outliers = np.where(np.abs(x) > OUTLIER * np.abs(x).mean(axis=1, keepdims=True), x, np.float32(0))
    spans = (x - outliers).reshape(len(x), -1, COLUMNS)
    largest = np.abs(spans).max(axis=2, keepdims=True)
    whole = np.rint(spans * np.divide(np.float32(127), largest)).astype(np.float64)
    return (whole * (largest / np.float32(127))).reshape(x.shape) + outliers


def random_activations(rows: int, depth: int, seed: int = 1) -> np.ndarray:
    """Rows of normal numbers; two in three have one or two outliers, mostly."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, depth)).astype(np.float32)
    for row in range(rows):
        x[row, random.choice(depth, row % 3, replace=False)] *= 40
    return x


def check(kind: BlockKind, depth: int, channels: int = 40) -> None:
    stored = random_rows(kind, channels, depth)
    exact = reference(kind, stored)
    panels = pack(kind, stored)
    assert np.array_equal(unpack(kind, panels, np.arange(channels), depth), exact)
    weight = PanelWeight.of(kind, panels, depth)
    x = random_activations(max(ROW_COUNTS), depth)
    expected = rounded(x) @ exact.astype(np.float64).T
    together = multiply(x, weight, channels)
    assert np.abs(together - expected).max() < 1e-5 * np.abs(expected).max()
    for count in ROW_COUNTS:  # a row does not depend on how many others there are
        assert np.array_equal(multiply(x[:count], weight, channels), together[:count])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(KINDS[name], 512)
    print(ISA.name)
