"""Terms of adapters on a GPU, against the formula."""

from __future__ import annotations

import pytest
import torch

from chairlift.kernels.adapter_table import WIDTH, entry
from chairlift.kernels.triton.products.adapters import FEW_ROWS, add_terms

DEPTH, CHANNELS = 72, 300
# The parts of each adapter's product: first channel, channels and rank. One adapter leaves channels out.
ADAPTERS = {1: [(0, 160, 4), (160, 70, 20), (230, 70, 4)], 2: [(160, 70, 8)], 5: [(0, 300, 33)]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [5, FEW_ROWS + 9])
@pytest.mark.parametrize("picks", [False, True])
def test_terms_equal_the_formula(count: int, dtype: torch.dtype, picks: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    products, number = 3, 1
    table = torch.zeros(6, products, WIDTH, dtype=torch.int64)
    matrices = {}
    for slot, parts in ADAPTERS.items():
        a = random(sum(rank for *_, rank in parts), DEPTH)
        bs = [(first, random(rank, size)) for first, size, rank in parts]
        table[slot, number] = torch.tensor(entry(a, bs))
        matrices[slot] = (a, bs)
    total = count + 3 if picks else count
    slots = torch.tensor([[-1, 1, 2, 5][i % 4] for i in range(total)], dtype=torch.int32)
    slots = torch.stack([slots, torch.where(slots == 1, 5, -1).int()], dim=1).contiguous()
    weights = torch.rand(total, 2, generator=generator)
    picked = torch.randperm(total, generator=generator)[:count] if picks else None
    x, out = random(count, DEPTH), random(count, CHANNELS)
    expected = out.double()
    for row in range(count):
        place = row if picked is None else int(picked[row])
        for k in range(2):
            slot = int(slots[place, k])
            if slot < 0:
                continue
            a, bs = matrices[slot]
            shrunk, before = weights[place, k].to(device) * (a.double() @ x[row].double()), 0
            for first, b in bs:
                expected[row, first : first + b.shape[1]] += shrunk[before : before + len(b)] @ b.double()
                before += len(b)
    picked = None if picked is None else picked.to(device)
    add_terms(x, out, table.to(device), number, slots.to(device), weights.to(device), picked, dtype)
    exact = dtype is torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-4 if exact else 0.5, rtol=1e-4 if exact else 2e-2)
