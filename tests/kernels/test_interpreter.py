"""The faster interpreter computes and refuses what Triton's own does."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU")


@triton.jit
def _row_sum(rows):
    return tl.sum(rows, axis=1)  # a function of the language that is itself written in it


@triton.jit
def _sum_kernel(x_ptr, out_ptr, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=column[None, :] < columns, other=0.0)
    tl.store(out_ptr + tl.program_id(0) * ROWS + row, _row_sum(x) + tl.program_id(0))


@triton.jit
def _mismatch_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 8), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def _odd_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, 4), tl.sum(tl.zeros([SIZE, 4], tl.float32), axis=0))


@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (8, 4), (2, 5), (1, 1)])
def test_results(rows: int, columns: int) -> None:
    assert interpreter._is_fast
    x, out = torch.randn(rows, columns), torch.full((3, rows), torch.nan)
    before = tl.arange, tl.tensor.__add__, tl.range
    for _ in range(2):
        _sum_kernel[(3,)](x, out, columns, ROWS=rows, COLUMNS=triton.next_power_of_2(columns))
        torch.testing.assert_close(out, x.sum(dim=1) + torch.arange(3)[:, None])
        assert (tl.arange, tl.tensor.__add__, tl.range) == before, "the language is restored behind a launch"


def test_shapes_that_do_not_fit_are_refused() -> None:
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
            _mismatch_kernel[(1,)](torch.zeros(8))
        with pytest.raises(interpreter.InterpreterError, match="power of 2"):
            _odd_kernel[(1,)](torch.zeros(8), SIZE=3)
    with pytest.raises(TypeError, match="must have type"):
        tl.block_type(tl.float32, [4.0])
    assert tl.block_type(tl.float32, [4, 2]) == tl.block_type(tl.float32, [tl.constexpr(4), 2])
    assert tl.block_type(tl.float32, [4, 2]) != tl.block_type(tl.float16, [4, 2])
    assert str(tl.block_type(tl.float16, [4, 2])) == str(tl.block_type(tl.float16, [tl.constexpr(4), 2]))
