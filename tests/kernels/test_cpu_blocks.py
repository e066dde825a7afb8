"""Products with blocks of GGUF files, against exact arithmetic with the dequantized weights."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from chairlift.kernels.cpu.blocks.panels import KINDS, pack, unpack
from chairlift.kernels.cpu.blocks.product import PanelWeight
from chairlift.kernels.cpu.blocks.rows import BlockRows, round_block_row
from chairlift.kernels.cpu.simd import AVX2, PLAIN
from tests.kernels.block_cases import check, multiply, random_activations, random_rows, reference, rounded

_AVX2 = "+avx,+avx2,+fma,+f16c"


@pytest.mark.parametrize("name", KINDS)
def test_products_equal_those_of_dequantized_weights(name: str) -> None:
    check(KINDS[name], 768)


def test_a_depth_that_ends_within_a_unit() -> None:
    check(KINDS["Q4_0"], 32 * 5, channels=16)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": _AVX2}, AVX2.name),
        pytest.param({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": _AVX2}, AVX2.name, marks=pytest.mark.slow),
        pytest.param({"NUMBA_CPU_NAME": "generic"}, PLAIN.name, marks=pytest.mark.slow),
    ],
    ids=["AVX2", "AVX2 all kinds", "generic"],
)
def test_other_instruction_sets(request: pytest.FixtureRequest, setting: dict[str, str], found: str) -> None:
    """Numbers of 4, 5, 6 and 8 bits, with and without minima, and values from a table; all kinds where it may be
    slow."""
    kinds = ["Q8_0", "Q5_K", "Q6_K", "IQ4_NL"] if request.node.callspec.id == "AVX2" else list(KINDS)
    command = [sys.executable, "-m", "tests.kernels.block_cases", *kinds]
    done = subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == found


def test_panels_of_different_kinds_in_one_weight() -> None:
    depth, x = 256, np.random.default_rng(2).normal(size=(3, 256)).astype(np.float32)
    parts = [(KINDS[name], random_rows(KINDS[name], 32, depth)) for name in ("Q4_K", "Q6_K")]
    packed = [pack(kind, rows) for kind, rows in parts]
    tables = [PanelWeight.of(kind, panels, depth).panels for (kind, _), panels in zip(parts, packed, strict=True)]
    bias = np.arange(64, dtype=np.float32)
    found = multiply(x, PanelWeight(np.concatenate(tables)), 64, bias)
    exact = np.concatenate([reference(kind, rows) for kind, rows in parts]).astype(np.float64)
    assert np.allclose(found, rounded(x) @ exact.T + bias, rtol=1e-5, atol=1e-4)


def test_rows_are_packed_in_another_order() -> None:
    kind = KINDS["Q5_1"]
    stored = random_rows(kind, 20, 64)
    order = np.random.default_rng(3).permutation(20)
    assert np.array_equal(unpack(kind, pack(kind, stored, order), np.arange(20), 64), reference(kind, stored)[order])


def test_outliers_do_not_cost_their_neighbours_their_precision() -> None:
    kind, depth = KINDS["Q8_0"], 256
    stored = random_rows(kind, 16, depth)
    exact, panels = reference(kind, stored).astype(np.float64), pack(kind, stored)
    x = random_activations(30, depth)
    x[::3, 40] = 1000
    errors = multiply(x, PanelWeight.of(kind, panels, depth), 16) - x @ exact.T
    with_outlier = np.arange(30) % 3 == 0
    assert np.square(errors[with_outlier]).mean() < 1.5 * np.square(errors[~with_outlier]).mean()


def test_the_smallest_numbers_are_no_outliers() -> None:
    """Their mean is rounded to zero; rows have no room for so many outliers."""
    x = np.zeros((2, 4096), dtype=np.float32)
    x[:, ::3] = np.float32(1.4e-45)
    rows = BlockRows.empty(2, 4096)
    for row in range(2):
        round_block_row(x[row], rows, row)
    assert rows.outliers[:, 0, 0].tolist() == [0, 0]


def test_nan_stays_in_its_row() -> None:
    kind = KINDS["Q4_1"]
    panels = pack(kind, random_rows(kind, 16, 64))
    x = np.ones((2, 64), dtype=np.float32)
    x[1, 40] = np.nan
    found = multiply(x, PanelWeight.of(kind, panels, 64), 16)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
