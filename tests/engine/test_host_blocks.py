"""KV blocks are copied to host memory and back."""

from __future__ import annotations

import pytest
import torch

from chairlift.attention.storage import KVStorage
from chairlift.core.plan import BlockCopy, BlockSwap, Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import MemoryPlan, plan_host_slots
from chairlift.errors import InvalidParameter
from chairlift.runner.memory import HostBlocks, make_copies


def storage(num_blocks: int = 6) -> KVStorage:
    sides = [
        [torch.arange(num_blocks * 4.0).view(num_blocks, 2, 1, 2) + 1000 * layer + 500 * side for layer in range(2)]
        for side in range(2)
    ]
    return KVStorage(sides[0], sides[1])


def contents(kv: KVStorage, block: int) -> list[torch.Tensor]:
    return [tensor[block].clone() for tensor in (*kv.keys, *kv.values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_restored_block_is_the_saved_one_in_every_layer() -> None:
    kv = storage()
    host = HostBlocks(kv, num_slots=3)
    one, two = contents(kv, 1), contents(kv, 4)
    host.save([1, 4], [2, 0])
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    host.restore([0, 2], [3, 5])
    assert same(contents(kv, 3), two)
    assert same(contents(kv, 5), one)


def test_a_step_swaps_out_then_in_then_copies() -> None:
    """Block 1 is saved, overwritten from the host and copied to block 5 in the same step."""
    kv = storage()
    host = HostBlocks(kv, num_slots=2)
    before, other = contents(kv, 1), contents(kv, 2)
    host.save([2], [1])
    request = Request("r", [1], SamplingParams(), max_new_tokens=1, arrival=0.0)
    chunk = Chunk(request, 0, 1, [5], samples=True, copies=(BlockCopy(source=1, target=5),))
    plan = StepPlan(0, (chunk,), swap_outs=(BlockSwap(request, 1, 0),), swap_ins=(BlockSwap(request, 1, 1),))
    make_copies(plan, kv, host)
    assert same(contents(kv, 1), other)
    assert same(contents(kv, 5), other)
    host.restore([0], [3])
    assert same(contents(kv, 3), before)


def test_measuring_the_speed_leaves_the_cache_unchanged() -> None:
    kv = storage()
    before = [contents(kv, block) for block in range(6)]
    assert HostBlocks(kv, num_slots=4).bytes_per_second() > 0
    assert all(same(contents(kv, block), old) for block, old in enumerate(before))


def test_the_number_of_host_slots() -> None:
    plan = MemoryPlan(0, bytes_per_token=100, block_size=4, num_blocks=10, max_model_len=64, source="")
    assert plan_host_slots(1000, plan) == 2
    assert plan_host_slots(None, plan) == 10
    with pytest.raises(InvalidParameter, match="swap_memory: is too little"):
        plan_host_slots(399, plan)
