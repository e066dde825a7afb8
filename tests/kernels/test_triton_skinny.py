"""Products with few rows against float64."""

from __future__ import annotations

import pytest
import torch

from chairlift.kernels.triton_skinny import skinny_linear


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 300), (3, 40, 1024), (17, 33, 2100), (2, 70, 8200)])
@pytest.mark.parametrize("residual", [False, True])
def test_skinny_linear(rows: int, columns: int, depth: int, residual: bool, device: torch.device) -> None:
    x, weight = torch.randn(rows, depth, device=device), torch.randn(columns, depth, device=device)
    total = torch.randn(rows, columns, device=device)
    expected = x.double() @ weight.double().T + (total.double() if residual else 0.0)
    for _ in range(2):  # the second run finds what the first left behind
        found = skinny_linear(x, weight, add_to=total.clone() if residual else None)
        assert float((found.double() - expected).norm() / expected.norm()) < 1e-5
