"""Where the time of a step goes on a GPU, by torch's profiler."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from chairlift.engine.startup import StartedEngine
from chairlift.progress import Note
from chairlift_lab.profile.chrome_trace import Span, trace_events
from chairlift_lab.profile.gpu_timeline import GPUTimeline, device_activities, launch_seconds, read_timeline
from chairlift_lab.profile.step_profile import (
    WARM_UP_STEPS,
    Batch,
    BatchProfile,
    PartTime,
    ProfileSettings,
    TimedStep,
    mean_context,
    mean_work,
)

ENGINE_TRACK = 1_000_000  # not the id of any thread


def profile_on_gpu(
    started: StartedEngine, settings: ProfileSettings, note: Note
) -> tuple[list[BatchProfile], list[dict[str, Any]]]:
    """Profile each batch size; returns the profiles and the slices of a trace.

    Every batch runs twice: without the profiler for the time of a step, and with it for its parts.
    """
    rng = Random(settings.seed)
    profiles, events = [], []
    note("capturing graphs")
    started.runner.capture_decodes()  # otherwise the first steps wait for compilers, or take generic kernels
    for size in settings.batches:
        note(f"batch {size}: {settings.steps} steps")
        plain, _ = _run(started, settings, size, rng, watched=False)
        note(f"batch {size}: {settings.steps} steps, profiled")
        watched, recorded = _run(started, settings, size, rng, watched=True)
        profiles.append(make_profile(started, size, plain, watched, recorded))
        events += recorded
    return profiles, events


def _run(
    started: StartedEngine, settings: ProfileSettings, size: int, rng: Random, *, watched: bool
) -> tuple[list[TimedStep], list[dict[str, Any]]]:
    batch = Batch(started.engine, size, settings.prompt_tokens, rng)
    batch.start()
    if not watched:
        steps = list(batch.run(settings.steps))
        batch.end()
        return steps, []
    activities = [torch.profiler.ProfilerActivity.CUDA]  # CPU activities would slow the host
    with torch.profiler.profile(activities=activities) as profiler:
        steps = list(batch.run(WARM_UP_STEPS + settings.steps))
        torch.cuda.synchronize()
    batch.end()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    recorded: list[dict[str, Any]] = trace["traceEvents"]
    return steps[WARM_UP_STEPS:], recorded + _engine_events(steps, trace.get("baseTimeNanoseconds", 0))


def _engine_events(steps: Sequence[TimedStep], base: int) -> list[dict[str, Any]]:
    """The host's steps as trace events, in the profiler's clock: nanoseconds of wall time since `base`."""
    shift = (time.time_ns() - time.perf_counter_ns() - base) * 1e-9
    spans = [
        Span(
            f"step, {step.done.requests} requests",
            "engine",
            step.begin + shift,
            step.end + shift,
            {"step": step.done.step},
        )
        for step in steps
    ]
    return trace_events(spans, "engine", ENGINE_TRACK)


def make_profile(
    started: StartedEngine,
    size: int,
    plain: Sequence[TimedStep],
    watched: Sequence[TimedStep],
    recorded: Sequence[Mapping[str, Any]],
) -> BatchProfile:
    timeline = read_timeline(device_activities(recorded), skip_steps=WARM_UP_STEPS, steps=len(watched))
    work, count = mean_work(started, watched), timeline.steps
    parts = [PartTime(name, seconds / count, work.get(name)) for name, seconds in timeline.parts.items()]
    pieces = {name: seconds / count for name, seconds in timeline.kernels.items()}
    return BatchProfile(
        size,
        mean_context(watched),
        count,
        timeline.seconds / count,
        parts,
        pieces,
        _more(timeline, plain, launch_seconds(recorded) / (WARM_UP_STEPS + len(watched))),
    )


def _more(timeline: GPUTimeline, plain: Sequence[TimedStep], launching: float) -> dict[str, float | None]:
    count = len(plain)
    unwatched = sum(step.seconds for step in plain) / count
    busy = timeline.seconds / timeline.steps * (1.0 - timeline.idle_share)
    host = [step.done.schedule_seconds + step.done.apply_seconds + step.done.timing.build for step in plain]
    return {
        "idle_share": timeline.idle_share,
        "step_seconds_without_profiler": unwatched,
        # In the device's clock: from a step's last kernel to the next one's first, including the copy of its inputs.
        "host_gap_share": max(0.0, 1.0 - sum(step.done.timing.forward for step in plain) / (count * unwatched)),
        # Kernels are not faster under the profiler, so this is a lower bound of the idle time.
        "idle_share_without_profiler": max(0.0, 1.0 - busy / unwatched),
        "kernels_per_step": timeline.num_kernels / timeline.steps,
        "launch_call_seconds": launching,
        "host_seconds": sum(host) / count,
    }
