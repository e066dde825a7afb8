"""The page's model of a run, on Node: it must agree with the scheduler."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from chairlift.server.dashboard.page import content_policy, dashboard_page, joined_modules
from chairlift.server.dashboard.recorder import TenantNumbers
from tests.core.driving import make_scheduler
from tests.dashboard.drafting import drafting
from tests.dashboard.recorded import RecordedRun, random_run
from tests.tools import require_tool

RUN_MODEL = """
const fs = await import("node:fs");
const found = JSON.parse(fs.readFileSync(0, "utf8")).map((frames) => {
  const model = new Model();
  let most = 0;
  for (const frame of frames) {
    model.apply(frame);
    most = Math.max(most, model.slotsTaken);
  }
  const cells = model.steps.map((_, index) =>
    model.workAt(index).map((work) => [work.request.id, work.start, work.count]));
  const bubbles = model.steps.map((_, col) =>
    model.slots.flat().filter((stay) => stay.idleFrom <= col && col < stay.to).length);
  const requests = [...model.requests.values()];
  return {
    most, cells, bubbles, taken: model.slotsTaken, slots: model.slots.length, finished: model.finished,
    room: model.key?.slots,
    outputs: Object.fromEntries(requests.map((request) => [request.id, request.outputs])),
    tables: requests.filter((request) => request.table.length).length,
    blocks: model.blocks.tally(), tokens: model.tokens, breaks: model.breaks,
    idle: model.idleTimes(-5, 1e9),
  };
});
console.log(JSON.stringify(found));
"""


TENANT_NAMES = """
const fs = await import("node:fs");
const model = new Model();
const shown = JSON.parse(fs.readFileSync(0, "utf8")).map((frame) => {
  model.apply(frame);
  return (frame.new || []).map((given) => model.tenantName(model.requests.get(given[1])));
});
console.log(JSON.stringify([shown, model.tenants.size]));
"""


def run_model(runs: list[list[Any]], tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_on_node(RUN_MODEL, runs, tmp_path)
    return found


def run_on_node(script_text: str, data: list[Any], tmp_path: Path, module: str = "model") -> Any:
    script = tmp_path / "model_test.mjs"
    script.write_text(joined_modules(module) + script_text)
    done = subprocess.run(
        [require_tool("node"), script], input=json.dumps(data), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_page_model_agrees_with_the_scheduler(tmp_path: Path) -> None:
    runs = [random_run(seed, policy=("continuous", "static")[seed % 2]) for seed in range(8)]
    runs += [random_run(seed, speculation=drafting(seed)) for seed in range(20, 23)]
    for run, found in zip(runs, run_model([run.frames for run in runs], tmp_path), strict=True):
        shapes = [sorted([name, start, count] for name, start, count in shape) for shape in run.shapes]
        assert [sorted(cells) for cells in found["cells"]] == shapes
        assert found["bubbles"] == run.idle
        assert found["taken"] == 0
        assert found["breaks"] == []
        assert found["slots"] <= run.scheduler.max_batch_requests
        assert sum(found["finished"].values()) == len(run.outputs)
        assert found["outputs"] == run.outputs
        assert found["tables"] == 0
        assert found["blocks"]["kept"] == sum(cached for _, cached in run.pools[-1])
    assert any(sum(run.idle) for run in runs)


def test_an_earlier_recording_has_its_slots(tmp_path: Path) -> None:
    run = random_run(3)
    for frame in run.frames:
        if "slots" in frame:
            frame["seats"] = frame.pop("slots")
    (found,) = run_model([run.frames], tmp_path)
    assert found["room"] == run.scheduler.max_batch_requests


def test_a_page_that_is_late_or_lost_frames_continues_from_a_keyframe(tmp_path: Path) -> None:
    run = random_run(2)
    late = random_run(2)
    half = len(late.frames) // 2
    joined = [late.frames[0], {"t": "lost", "frames": 3}, *run.frames[half:]]
    whole, broken = run_model([run.frames, joined], tmp_path)
    assert broken["taken"] == whole["taken"] == 0
    assert broken["slots"] <= run.scheduler.max_batch_requests


def test_a_page_that_reconnects_does_not_count_repeated_frames_twice(tmp_path: Path) -> None:
    run = RecordedRun(make_scheduler(max_batch_requests=2), steps_per_frame=2)
    for number in range(6):
        run.submit(f"r{number}", 5, 8)
    for _ in range(5):
        run.step()
    run.frame()
    run.frames.append(run.recorder.keyframe(run.now, 1000.0 + run.now))
    key = len(run.frames) - 1
    for _ in range(6):
        run.step()
    heard = len(run.frames)
    run.run_to_end()
    hello = {"t": "hello", "model": "m"}
    again = [*run.frames[:heard], hello, *run.frames[key:]]
    missed = [*run.frames[:key], hello, *run.frames[key + 2 :]]
    whole, twice, gap = run_model([run.frames, again, missed], tmp_path)
    assert twice == whole
    assert whole["breaks"] == []
    assert len(gap["breaks"]) == 1


def test_the_page_knows_when_the_engine_was_idle(tmp_path: Path) -> None:
    run = RecordedRun(make_scheduler(max_batch_requests=2))
    run.submit("a", 5, 3)
    run.run_to_end()
    run.now += 9
    before = run.now
    run.submit("b", 5, 3)
    run.run_to_end()
    (found,) = run_model([run.frames], tmp_path)
    ((col, seconds),) = found["idle"]
    assert 0 < col < len(found["cells"])
    assert 8 < seconds < before


def test_the_page_keeps_every_tenant_name_that_the_engine_does_not_repeat(tmp_path: Path) -> None:
    numbers, frames, expected = TenantNumbers(), list[dict[str, Any]](), list[list[str]]()
    handles = count()

    def add_frame(tenants: dict[int, str], frame: dict[str, Any], names: list[str]) -> None:
        frames.extend([{"t": "tenants", "names": tenants}, frame])
        expected.extend([[], names])

    def add_requests(names: list[str]) -> None:
        new = [[next(handles), f"{len(frames)}-{name}", 0.0, 4, 8, numbers.number_of(name), 0] for name in names]
        batch = {"t": "batch", "now": float(len(frames)), "new": new, "waiting": [], "reasons": {}, "evictions": 0}
        add_frame(numbers.take_unsent(), batch, names)

    def add_keyframe() -> None:
        now = float(len(frames))
        sizes = {"slots": 4, "num_blocks": 1, "block_size": 16, "requests": [], "blocks": []}
        standing: dict[str, Any] = {"waiting": [], "reasons": {}, "evictions": 0}
        add_frame(numbers.take_all(), {"t": "key", "now": now, "wall": now} | sizes | standing, [])

    old = [f"t{number}" for number in range(1000)]
    for name in [*old, *reversed(old)]:  # the smallest numbers are the most recent ones
        numbers.number_of(name)
    add_keyframe()
    for first in range(0, 990, 90):
        add_requests([f"n{number}" for number in range(first, first + 90)])
    add_requests(old[:5])  # just before the engine drops them
    add_keyframe()
    for wave in range(4):
        add_requests([f"w{wave}-{number}" for number in range(999)])
        add_requests([old[0]])
    add_requests([f"m{number}" for number in range(2500)])  # more than either side keeps
    shown, kept = run_on_node(TENANT_NAMES, frames, tmp_path)
    assert shown == expected
    assert kept == 2000


def test_the_modules_declare_no_name_twice() -> None:
    script = joined_modules("main")
    declared = Counter(
        line.split()[1].split("(")[0]
        for line in script.splitlines()
        if line.startswith(("const ", "let ", "class ", "function "))
    )
    assert [name for name, count in declared.items() if count > 1] == []
    assert "import {" not in script
    assert "\nexport " not in script
    assert "</script" not in script


def test_the_page_loads_no_other_files() -> None:
    page = dashboard_page()
    for outside in ("http://", "https://", '<link rel="stylesheet', "src="):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")
    assert "'unsafe-eval'" not in content_policy(page)
    assert "script-src 'sha256-" in content_policy(page)


def test_a_page_embeds_its_recording() -> None:
    page = dashboard_page(b"frames")
    assert page.count("ZnJhbWVz") == 1
    assert len(page) == len(dashboard_page()) + 8
