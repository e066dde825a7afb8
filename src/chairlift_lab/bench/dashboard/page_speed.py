"""How fast the dashboard draws a long run with full batches, in a real browser."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.cost_model import StepShape
from chairlift.core.events import StepDone
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.plan import StepResult, StepTiming
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.snapshot import SchedulerObserver
from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.recorder import SHOWN_WAITING, FrameData, StepRecorder
from chairlift.server.dashboard.recording import write_run

STEP_SECONDS = 0.02
STEPS_PER_FRAME = 5
MEASURED_SECONDS = 5.0

# Everything is in view and moves at every frame of the screen, as it does while the engine runs.
_MEASURE = """
const [steps, milliseconds, done] = arguments;
const app = window.chairlift;
app.replay.seek(app.replay.last);
app.replay.play(false);
app.lift.view.isLive = false;
app.lift.view.showSteps(steps);
const times = [];
let drawing = 0;
const refresh = app.lift.picture.refresh.bind(app.lift.picture);
app.lift.picture.refresh = () => { const begun = performance.now(); refresh(); drawing += performance.now() - begun; };
let working = 0; // all that the page does for a picture
const tick = app.tick.bind(app);
app.tick = (now) => { const begun = performance.now(); tick(now); working += performance.now() - begun; };
const look = (now) => {
  times.push(now);
  app.lift.view.right = app.model.nextCol - 50 + 40 * Math.sin(now / 300);
  app.lift.picture.invalidate();
  app.update();
  if (now - times[0] < milliseconds) return requestAnimationFrame(look);
  const gaps = times.slice(1).map((time, index) => time - times[index]);
  done({
    frames_per_s: (1000 * gaps.length) / (times.at(-1) - times[0]), slowest_ms: Math.max(...gaps),
    draw_ms: drawing / gaps.length, script_ms: working / gaps.length,
    steps_in_view: Math.floor(app.lift.view.visibleCols),
  });
};
requestAnimationFrame(look);
"""


def require_browser() -> tuple[str, str]:
    """The browser and its driver; raises before the measurement if there is none."""
    if find_spec("selenium") is None:
        raise InvalidParameter("frames", "needs selenium; install chairlift[dev]")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        raise InvalidParameter("frames", "needs chromium and chromedriver")
    return browser, driver


def measure_frames(*, steps: int, slots: int) -> dict[str, Any]:
    browser, driver = require_browser()
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1440,1000"):
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        lines = [json.dumps(frame, separators=(",", ":")).encode() for frame in full_batches(steps + 200, slots)]
        write_run(page, lines)
        chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            chrome.set_script_timeout(120)
            chrome.get(page.as_uri())
            found: dict[str, Any] = chrome.execute_async_script(_MEASURE, steps, 1000 * MEASURED_SECONDS)
        finally:
            chrome.quit()
    return found | {"seats": slots}


def full_batches(steps: int, slots: int) -> Iterator[FrameData]:
    """The frames of a run whose batches are always full, with requests of all lengths."""
    source = random.Random(0)
    scheduler = Scheduler(KVCache(slots * 40), FixedBudget.of(4 * slots), make_policy("continuous"), slots)
    recorder = StepRecorder(SchedulerObserver(scheduler, SHOWN_WAITING))
    yield {"t": "hello", "model": "none", "policy_switch": False}
    yield recorder.keyframe(0.0, 0.0)
    num_requests = 0
    for number in range(steps):
        now = number * STEP_SECONDS
        while len(scheduler.waiting) < 4:
            num_requests += 1
            scheduler.submit(_request(num_requests, now, source), now)
        plan = scheduler.schedule(now)
        sampled = [7] * sum(chunk.samples for chunk in plan.chunks)
        scheduler.apply(StepResult(plan, sampled, [None] * len(sampled)), now + STEP_SECONDS)
        shape = StepShape.of(plan)
        counts = (shape.decode_tokens, shape.prefill_tokens, shape.requests, len(scheduler.waiting))
        used = scheduler.kv.pool.num_used
        done = StepDone(
            now + STEP_SECONDS, number, *counts, used, 0, 0.0, 0.0, StepTiming(), seconds=STEP_SECONDS, plan=plan
        )
        recorder.record([*scheduler.drain_events(), done])
        if number % STEPS_PER_FRAME == 0:
            yield recorder.frame(now + STEP_SECONDS)


def _request(number: int, now: float, source: random.Random) -> Request:
    prompt = [source.randrange(30_000) for _ in range(source.randint(8, 200))]
    new = source.randint(10, 200)
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=new), max_new_tokens=new, arrival=now)
