"""The dashboard shows the tokens, the block table and the end of every beam."""

from __future__ import annotations

import pytest

from tests.beam.fake_model import run_plan, submit_beams
from tests.core.driving import make_scheduler
from tests.dashboard import recorded
from tests.dashboard.recorded import RecordedRun, read_back


@pytest.mark.parametrize("num_blocks", [25, 200])  # with and without preemptions
def test_frames_contain_every_beam(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "run_plan", run_plan)
    run = RecordedRun(make_scheduler(num_blocks, 2, max_batch_requests=8), steps_per_frame=3)
    preemptions = 0
    run.submit("plain", 6, 28)
    for number in range(2):
        members = submit_beams(run.scheduler, f"search{number}", range(number, 10 + number), 4, 9)
        run.requests |= {member.id: member for member in members}
    while run.scheduler.has_work:
        waiting = len(run.scheduler.waiting)
        run.step()
        preemptions += len(run.scheduler.waiting) > waiting
    run.step()
    run.frame()
    steps, endings = read_back(run.frames)
    assert [sorted(step) for step in steps] == [sorted(shape) for shape in run.shapes]
    assert endings == dict.fromkeys(run.requests, 1)
    shown = [given[4] for frame in run.frames for given in frame.get("end", ())]
    assert sorted(shown) == sorted(request.num_output for request in run.requests.values())
    assert bool(preemptions) == (num_blocks == 25)
    tables: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for frame, true_tables in zip(run.frames, run.tables, strict=True):
        names |= {given[0]: given[1] for given in (*frame.get("new", ()), *frame.get("requests", ()))}
        for preempted in frame.get("preempt", ()):
            tables.pop(preempted[0], None)
        for handle, start, blocks in frame.get("tables", ()):
            tables[handle] = tables.get(handle, [])[:start] + blocks
        assert {names[handle]: tuple(table) for handle, table in tables.items() if table} == true_tables
    assert run.recorder._known == {}
