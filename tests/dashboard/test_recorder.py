"""Frames contain every token, every table and every block."""

from __future__ import annotations

import json
from functools import partial

import pytest

from chairlift.server.dashboard.recorder import TenantNumbers
from tests.core.driving import make_scheduler, with_states
from tests.dashboard.drafting import drafting
from tests.dashboard.recorded import RecordedRun, random_run, read_back


@pytest.mark.parametrize("seed", range(12))
def test_frames_contain_every_token_and_every_ending(seed: int) -> None:
    speculation = drafting(seed) if seed % 3 == 0 else None
    run = random_run(seed, policy=("continuous", "static")[seed % 2], speculation=speculation)
    steps, endings = read_back(run.frames)
    assert [sorted(step) for step in steps] == [sorted(shape) for shape in run.shapes]
    assert endings == dict.fromkeys(run.outputs, 1)
    result = {frame_end[0]: frame_end[4] for frame in run.frames for frame_end in frame.get("end", ())}
    assert sorted(result.values()) == sorted(run.outputs.values())


@pytest.mark.parametrize("seed", range(12))
def test_frames_contain_every_table_and_every_block(seed: int) -> None:
    run = random_run(seed, speculation=drafting(seed) if seed % 3 == 0 else None)
    tables: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    pool = [(0, False)] * len(run.pools[0])
    for frame, true_tables, true_pool in zip(run.frames, run.tables, run.pools, strict=True):
        names |= {given[0]: given[1] for given in (*frame.get("new", ()), *frame.get("requests", ()))}
        for preempted in frame.get("preempt", ()):
            tables.pop(preempted[0], None)
        for handle, start, blocks in frame.get("tables", ()):
            tables[handle] = tables.get(handle, [])[:start] + blocks
        changes = iter(frame.get("blocks", ()))
        for block, references, cached in zip(changes, changes, changes, strict=True):
            pool[block] = references, bool(cached)
        assert {names[handle]: tuple(table) for handle, table in tables.items() if table} == true_tables
        assert pool == true_pool


def test_a_later_keyframe_contains_the_complete_state() -> None:
    run = RecordedRun(make_scheduler(max_batch_requests=2), steps_per_frame=100)
    run.submit("a", 6, 9)
    run.submit("b", 30, 9, tenant="bob")
    run.submit("c", 5, 9)
    for _ in range(4):
        run.step()
    run.frame()
    key = run.recorder.keyframe(run.now, 0.0)
    described = {given[1]: (given[7], given[8], given[9], tuple(given[10])) for given in key["requests"]}
    scheduler = run.scheduler
    for name, state in (("a", "running"), ("b", "running"), ("c", "waiting")):
        request = scheduler.get(name)
        assert request is not None
        table = tuple(scheduler.kv.table(request))
        assert described[name] == (state, request.num_computed, request.num_output, table)
    assert [reason for _, reason in key["waiting"]] == ["slots"]
    assert key["slots"] == 2
    assert set(run.recorder.take_tenant_names(all_of_them=True).values()) == {"", "bob"}
    assert run.recorder.take_tenant_names() == {}


def test_a_long_decode_takes_little_space() -> None:
    """The size grows with requests and frames, not with tokens."""
    run = RecordedRun(make_scheduler(num_blocks=400, max_batch_requests=8), steps_per_frame=50)
    for number in range(8):
        run.submit(f"r{number}", 3, 99)
    run.run_to_end()
    decodes = [frame for frame in run.frames if len(frame.get("steps", ())) == 50 and not frame.get("end")]
    assert decodes
    assert all(len(frame["runs"]) <= 16 for frame in decodes)
    assert all(len(json.dumps(frame)) < 9000 for frame in decodes)


def test_nothing_is_tracked_once_stopped() -> None:
    run = RecordedRun(make_scheduler())
    run.recorder.stop()
    run.submit("a", 6, 9)
    run.scheduler.schedule(0.0)
    changes = run.scheduler.kv.take_changes()
    assert not changes.blocks
    assert not changes.rewritten


def test_finished_requests_are_forgotten() -> None:
    run = random_run(3)
    assert run.recorder._known == {}
    assert len(run.recorder._runs) <= run.scheduler.max_batch_requests  # those of the last step


def test_the_number_of_tenants_is_bounded_and_open_ones_have_names() -> None:
    run = RecordedRun(make_scheduler(num_blocks=400, max_batch_requests=8), steps_per_frame=1000)
    run.recorder._tenants = TenantNumbers(max_tenants=10)
    names: dict[int, str] = {}
    for number in range(50):
        run.submit(f"r{number}", 2, 1000 if number < 3 else 1, tenant=f"t{number}")
        run.step()
        names |= run.recorder.take_tenant_names()
    assert [names[number] for number in range(50)] == [f"t{number}" for number in range(50)]
    run.frame()
    key = run.recorder.keyframe(run.now, 0.0)
    result = run.recorder.take_tenant_names(all_of_them=True)
    assert len(result) == 10
    assert {given[1]: result[given[5]] for given in key["requests"]}.items() >= {
        "r0": "t0",
        "r1": "t1",
        "r2": "t2",
    }.items()


def test_frames_of_a_model_with_recurrent_layers_count_its_state_slots() -> None:
    run = RecordedRun(make_scheduler(kv_class=partial(with_states, num_slots=7)), steps_per_frame=100)
    run.submit("a", 9, 2)
    run.step()
    run.frame()
    assert run.frames[-1]["states"] == [1, 1, 7]  # one of the request, one snapshot of its prompt
    assert "states" not in random_run(0).frames[0]
