"""The tensors of a plan: ragged, with idle rows, and rectangular."""

from __future__ import annotations

import torch

from chairlift.attention.batch import StepBatch, build_batch
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams

CPU = torch.device("cpu")
STORAGE = KVStorage([torch.zeros(10, 4, 1, 1)], [torch.zeros(10, 4, 1, 1)])  # nine blocks of 4, and the scratch block
SCRATCH = 9 * 4


def chunk(prompt: range, start: int, count: int, table: list[int]) -> Chunk:
    request = Request(f"{prompt}", list(prompt), SamplingParams(), max_new_tokens=4, arrival=0.0)
    return Chunk(request, start, count, table, samples=start + count == len(prompt))


PREFILL = chunk(range(100, 107), 4, 3, [5, 2])
DECODE = chunk(range(200, 206), 5, 1, [7, 0])
PART = chunk(range(300, 320), 0, 2, [1])  # does not reach the last token, so it samples nothing


def build(idle_rows: int = 0, rectangular: bool = False) -> StepBatch:
    plan = StepPlan(0, (PREFILL, DECODE, PART), idle_rows)
    return build_batch(plan, STORAGE, CPU, rectangular=rectangular)


def test_a_ragged_batch_has_no_padding() -> None:
    batch = build()
    assert batch.tokens.tolist() == [104, 105, 106, 205, 300, 301]
    assert batch.positions.tolist() == [4, 5, 6, 5, 0, 1]
    assert batch.sampled_rows is not None
    assert batch.sampled_rows.tolist() == [2, 3]
    assert batch.layout.offsets == [0, 3, 4, 6]
    assert batch.layout.starts == [4, 5, 0]
    assert batch.layout.ends == [7, 6, 2]
    assert batch.layout.slot_mapping.tolist() == [8, 9, 10, 1, 4, 5]
    assert batch.num_padding == 0


def test_single_tokens_that_are_sampled_are_all_rows_in_order() -> None:
    other = chunk(range(300, 309), 8, 1, [3, 6, 1])
    single = build_batch(StepPlan(0, (DECODE, other)), STORAGE, CPU)
    general = build_batch(StepPlan(0, (DECODE, other, PREFILL)), STORAGE, CPU)
    assert single.needed_rows is None
    assert single.sampled_rows.tolist() == [0, 1]
    assert single.read_rows.tolist() == []
    assert single.num_padding == 0
    for name in ("tokens", "positions"):
        assert getattr(single, name).tolist() == getattr(general, name).tolist()[:2]
    assert single.layout.slot_mapping.tolist() == general.layout.slot_mapping.tolist()[:2] == [1, 4]
    assert single.layout.tables.tolist() == general.layout.tables.tolist()[:2]
    assert [*single.layout.offsets] == general.layout.offsets[:3]
    assert single.layout.starts == general.layout.starts[:2]
    assert single.layout.ends == general.layout.ends[:2]
    assert general.needed_rows is not None
    assert general.needed_rows.tolist() == [0, 1, 4]


def test_an_idle_row_is_one_padding_token() -> None:
    batch = build(idle_rows=2)
    assert batch.tokens.tolist() == [104, 105, 106, 205, 300, 301, 0, 0]
    assert batch.positions.tolist() == [4, 5, 6, 5, 0, 1, 0, 0]
    assert batch.sampled_rows.tolist() == [2, 3, 6, 7]
    assert batch.layout.ends == [7, 6, 2, 1, 1]
    assert batch.layout.slot_mapping.tolist() == [8, 9, 10, 1, 4, 5, SCRATCH, SCRATCH]
    assert batch.layout.tables[3:, 0].tolist() == [9, 9]
    assert batch.num_padding == 2


def test_a_rectangle_is_as_wide_as_the_longest_chunk() -> None:
    batch = build(idle_rows=1, rectangular=True)
    assert batch.tokens.view(4, 3).tolist() == [[104, 105, 106], [205, 0, 0], [300, 301, 0], [0, 0, 0]]
    assert batch.positions.view(4, 3).tolist() == [[4, 5, 6], [5, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert batch.sampled_rows.tolist() == [2, 3, 9]
    assert batch.layout.offsets == [0, 3, 6, 9, 12]
    assert batch.layout.ends == [7, 6, 2, 1]
    slots_of, fill = [[8, 9, 10], [1], [4, 5], []], [SCRATCH] * 3
    assert batch.layout.slot_mapping.view(4, 3).tolist() == [(slots + fill)[:3] for slots in slots_of]
    assert batch.num_padding == 12 - 6
