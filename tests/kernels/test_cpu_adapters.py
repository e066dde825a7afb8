"""The terms of adapters on CPUs, against torch: rows of any mix, and each row as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import AdapterRows
from chairlift.layers.adapters import AdapterBank, PackedAdapter, PartTerm, ProductTerms
from chairlift.layers.linear import Linear

DEPTH, CHANNELS, SLOTS = 50, 70, 5


def random_adapter(generator: torch.Generator, ranks: tuple[int, int], dtype: torch.dtype) -> PackedAdapter:
    """Terms of one product, whose two parts have channels that are no whole panels."""
    a, first, second = (
        (torch.randn(shape, generator=generator) * 0.3).to(dtype).float()
        for shape in ((sum(ranks), DEPTH), (ranks[0], 37), (ranks[1], 20))
    )
    return {0: ProductTerms(a, [PartTerm(0, first), PartTerm(45, second)])}


def expected(x: Tensor, out: Tensor, rows: AdapterRows, adapters: list[PackedAdapter]) -> Tensor:
    result = out.double().clone()
    for row, (slots, weights) in enumerate(zip(rows.slots.tolist(), rows.weights.tolist(), strict=True)):
        for slot, weight in zip(slots, weights, strict=True):
            if slot < 0 or 0 not in adapters[slot]:
                continue
            a, parts = adapters[slot][0]
            shrunk, start = weight * (a.double() @ x[row].double()), 0
            for first, b in parts:
                result[row, first : first + b.shape[1]] += shrunk[start : start + len(b)] @ b.double()
                start += len(b)
    return result


def run(bank: AdapterBank, x: Tensor, out: Tensor, rows: AdapterRows, picked: Tensor | None = None) -> Tensor:
    result = out.clone()
    bank.begin(rows)
    if picked is not None:
        bank.pick(picked)
    bank.add(0, x, result)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_any_mix_are_those_of_each_row_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    ranks = [(1, 3), (4, 9), (16, 16), (33, 2)]
    adapters = [random_adapter(generator, each, dtype) for each in ranks] + [{}]
    bank = AdapterBank()
    bank.attach([Linear(torch.zeros(CHANNELS, DEPTH))], torch.device("cpu"), torch.float32, SLOTS)
    for slot, adapter in enumerate(adapters):
        placed = bank.placed(adapter)
        assert not adapter or placed.memory[0].dtype is (torch.uint16 if dtype is torch.bfloat16 else torch.float32)
        bank.put(slot, placed)
    for count in (1, 3, 12, 150):
        slots = torch.randint(-1, SLOTS, (count, 1), generator=generator, dtype=torch.int32)
        second = torch.where(slots >= 0, (slots + 1) % SLOTS, -1)
        second[::2] = -1
        weights = torch.randn(count, 2, generator=generator)
        rows = AdapterRows(torch.cat([slots, second], 1).int(), weights)
        x, out = torch.randn(count, DEPTH, generator=generator), torch.randn(count, CHANNELS, generator=generator)
        together = run(bank, x, out, rows)
        torch.testing.assert_close(together.double(), expected(x, out, rows, adapters), atol=1e-4, rtol=1e-5)
        for row in range(0, count, 7):
            own = slice(row, row + 1)
            alone = run(bank, x[own], out[own], AdapterRows(rows.slots[own], weights[own]))
            assert torch.equal(alone, together[own]), "a row depends on nothing else in the step"
        picked = torch.randperm(count, generator=generator)[: count // 2 + 1]
        assert torch.equal(run(bank, x[picked], out[picked], rows, picked), together[picked])
