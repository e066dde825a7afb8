"""Blocks with places that a draft head has not computed are cleared before it reads them."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.plan import BlockCopy, BlockSwap, Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.speculation.head_states import MANY, UnwrittenBlocks

SIZE = 4


def request_of(num_prompt: int) -> Request:
    return Request("r", [1] * num_prompt, SamplingParams(temperature=0.0), max_new_tokens=99, arrival=0.0)


def plan_of(*chunks: Chunk, outs: Sequence[BlockSwap] = (), ins: Sequence[BlockSwap] = ()) -> StepPlan:
    return StepPlan(step=0, chunks=chunks, swap_outs=tuple(outs), swap_ins=tuple(ins))


def prompt_chunk(start: int, count: int, table: Sequence[int], copies: Sequence[BlockCopy] = ()) -> Chunk:
    request = request_of(start + count + 1)
    return Chunk(request, start, count, table, samples=False, copies=tuple(copies))


def cleared(unwritten: UnwrittenBlocks, *table: int) -> list[int]:
    return unwritten.take([table], SIZE)


def test_places_behind_a_computed_prompt_are_cleared_once() -> None:
    unwritten = UnwrittenBlocks()
    unwritten.note(plan_of(prompt_chunk(0, 6, [7, 2])), SIZE, computes_prompts=True)
    assert cleared(unwritten, 7, 2) == [10, 11]
    assert cleared(unwritten, 7, 2) == []


def test_a_computed_chunk_of_one_token_inside_a_block_is_not_cleared() -> None:
    unwritten = UnwrittenBlocks()
    unwritten.note(plan_of(prompt_chunk(0, 5, [7, 2])), SIZE, computes_prompts=True)
    unwritten.note(plan_of(prompt_chunk(5, 1, [7, 2])), SIZE, computes_prompts=True)
    assert cleared(unwritten, 7, 2) == [10, 11]


def test_a_block_is_still_unwritten_after_it_was_swapped() -> None:
    unwritten = UnwrittenBlocks()
    chunk = prompt_chunk(0, 4, [3])
    unwritten.note(plan_of(chunk), SIZE)
    unwritten.note(plan_of(outs=[BlockSwap(chunk.request, 3, 9)]), SIZE)
    assert cleared(unwritten, 3) == [12, 13, 14, 15]
    unwritten.note(plan_of(ins=[BlockSwap(chunk.request, 5, 9)]), SIZE)
    assert cleared(unwritten, 5) == [20, 21, 22, 23]


def test_a_copy_is_as_unwritten_as_its_source() -> None:
    unwritten = UnwrittenBlocks()
    unwritten.note(plan_of(prompt_chunk(0, 4, [3])), SIZE)
    unwritten.note(plan_of(prompt_chunk(5, 1, [0, 6], [BlockCopy(3, 6)])), SIZE)
    assert cleared(unwritten, 6) == [12, 13, 14, 15, 24, 25, 26, 27]


def test_blocks_of_finished_requests_are_cleared_little_by_little() -> None:
    unwritten = UnwrittenBlocks()
    unwritten.note(plan_of(prompt_chunk(0, 3 * MANY * SIZE, range(3 * MANY))), SIZE)
    last = 3 * MANY - 1
    counts = [len(cleared(unwritten, last)) // SIZE for _ in range(4)]
    assert counts == [MANY + 1, MANY, MANY - 1, 0]


def test_places_before_a_computed_chunk_stay_unwritten() -> None:
    """A prompt of one token beside single tokens is not computed for the head."""
    unwritten = UnwrittenBlocks()
    unwritten.note(plan_of(prompt_chunk(0, 1, [5])), SIZE, computes_prompts=True)
    unwritten.note(plan_of(prompt_chunk(1, 1, [5])), SIZE)
    unwritten.note(plan_of(prompt_chunk(2, 1, [5])), SIZE, computes_prompts=True)
    assert cleared(unwritten, 5) == [21, 22, 23]
