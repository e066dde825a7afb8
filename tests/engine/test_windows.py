"""The memory of models with windows: what the planner says, and what a scheduler makes of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.placement import Placement, place_layers
from chairlift.core.events import RequestPreempted
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.kv.windowed_cache import FULL, Reach
from chairlift.engine.memory_plan import MemoryPlan, bytes_per_token, plan_memory
from chairlift.runner.memory import allocate_storage
from tests.core.driving import make_request, make_scheduler, run_plan

CPU = torch.device("cpu")
LENGTH = 32_768
STEP = 2048  # tokens


def layers_of(count: int, every: int, window: int, kv_heads: int, head_dim: int) -> list[AttentionLayer]:
    """Layers of which every so-manieth sees all tokens, and the others a window."""
    return [
        AttentionLayer(i, 16, kv_heads, head_dim, 1.0, window=None if i % every == every - 1 else window)
        for i in range(count)
    ]


GEMMA_3_12B = layers_of(48, 6, 1024, 8, 256)
GPT_OSS_20B = layers_of(24, 2, 128, 8, 64)


def plan(layers: list[AttentionLayer], kv_memory: int, placement: Placement | None) -> MemoryPlan:
    return plan_memory(
        layers,
        weight_bytes=0,
        kv_memory=kv_memory,
        dtype=torch.bfloat16,
        device=CPU,
        block_size=16,
        max_model_len=LENGTH,
        max_batch_requests=256,
        free=2**40,
        placement=placement,
        step_tokens=STEP,
    )


@pytest.mark.parametrize(("layers", "times"), [(GEMMA_3_12B, 4.0), (GPT_OSS_20B, 1.8)], ids=["gemma 3", "gpt-oss"])
def test_more_long_sequences_fit_in_the_same_memory(layers: list[AttentionLayer], times: float) -> None:
    memory = 8 * LENGTH * bytes_per_token(layers, torch.bfloat16)
    assert plan(layers, memory, None).sequences(LENGTH) == 8
    planned = plan(layers, memory, place_layers(layers, LENGTH))
    assert planned.sequences(LENGTH) >= times * 8
    scheduler = make_scheduler(
        planned.num_blocks,
        16,
        max_batch_tokens=STEP,
        max_batch_requests=256,
        prefix_caching=False,
        kv_class=lambda blocks, size, prefix_caching: planned.make_cache(prefix_caching=prefix_caching),
    )
    for number in range(int(planned.sequences(LENGTH)) + 5):
        scheduler.submit(make_request(f"r{number}", [7] * (LENGTH - 900), 900), 0.0)
    most = steps = 0
    while scheduler.has_work:
        scheduler.apply(run_plan(scheduler.schedule(0.0), lambda request: 7), 0.0)
        most, steps = max(most, sum(request.num_output > 0 for request in scheduler.running)), steps + 1
        if steps % 50 == 0:
            check_accounting(scheduler)
    # The last sequence that is admitted may not fit whole.
    assert sum(isinstance(event, RequestPreempted) for event in scheduler.drain_events()) <= 1
    assert times * 8 <= most
    assert abs(most - planned.sequences(LENGTH)) < 1
    check_quiescent(scheduler)


def test_the_log_shows_the_groups_as_documented() -> None:
    placement = place_layers(GEMMA_3_12B, LENGTH)
    lines = plan(GEMMA_3_12B, 24 * 2**30, placement).lines()
    assert "65,536 bytes per token of 8 layers x 16 tokens per block = 1.0 MiB per block" in lines[2]
    assert "40 layers with a window of 1,024 tokens and 8 layers with the whole context, in 6 block tables" in lines[3]


def test_the_layers_of_a_table_share_their_planes_with_those_of_others() -> None:
    placement = place_layers(layers_of(6, 3, 9, 1, 4), 100)
    assert placement.reaches == (FULL, Reach(9), Reach(9))
    assert placement.tables == (1, 1, 0, 2, 2, 0)
    assert {*zip(placement.tables, placement.planes, strict=True)} == {(t, p) for t in range(3) for p in range(2)}
    storage = allocate_storage(layers_of(6, 3, 9, 1, 4), 5, 2, torch.float32, CPU, placement)
    assert len(storage.tensors) == 4
    assert storage.num_tables == 3


@pytest.mark.parametrize(
    ("layers", "reaches"),
    [
        (layers_of(6, 3, 100, 1, 4), [FULL]),  # no window is shorter than the context
        (layers_of(4, 9, 50, 1, 4), [Reach(50)]),
        ([*layers_of(5, 3, 50, 1, 4), AttentionLayer(5, 16, 1, 8, 1.0)], [FULL]),  # one has another shape
        (layers_of(34, 6, 50, 1, 4), [FULL] + [Reach(50)] * 6),  # one plane of a table is unused
        ([], [FULL]),
    ],
)
def test_which_tables_there_are(layers: list[AttentionLayer], reaches: list[Reach]) -> None:
    assert place_layers(layers, 100).reaches == tuple(reaches)


def test_layers_of_a_draft_network_are_in_the_first_table() -> None:
    layers = layers_of(6, 3, 9, 1, 4)
    drafting = [*layers, AttentionLayer(6, 16, 1, 4, 1.0)]
    placed = partial(place_layers, context=100, num_drafting=1)
    placement = placed(drafting)
    assert placement.num_tables > 1
    assert placement.tables[-1] == 0
    assert placed([*layers, AttentionLayer(6, 16, 1, 8, 1.0)]).reaches == (FULL,)
