"""Where the time of a step goes on a GPU, by torch's profiler: kernels by kind, launch gaps and host gaps."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from chairlift.engine.startup import StartedEngine
from chairlift.progress import Note
from chairlift_lab.common.floor import ATTENTION, GEMM, SAMPLING
from chairlift_lab.profile.step_profile import (
    WARM_UP_STEPS,
    Batch,
    BatchProfile,
    PartTime,
    ProfileSettings,
    Span,
    TimedStep,
    mean_context,
    mean_work,
    trace_events,
)

RECURRENCE, HOST_GAP, LAUNCH, OTHER = "recurrence", "host gap", "launch", "other"
PARTS = (GEMM, ATTENTION, RECURRENCE, SAMPLING, OTHER, LAUNCH, HOST_GAP)
FIRST_KERNEL = "begin_step_kernel"  # first kernel of every step of the GPU runner
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")  # names of torch's profiler
LAUNCH_CALLS = re.compile(r"(cuda|cu)(GraphLaunch|LaunchKernel|LaunchKernelExC|LaunchKernelEx)(_.*)?$")

# By substrings of a kernel's name, first match; cuBLAS has many names.
_KINDS = (
    (SAMPLING, re.compile(r"_sample_kernel|argmax|multinomial", re.IGNORECASE)),
    (
        ATTENTION,
        re.compile(
            r"decode_kernel|_prefill_kernel|flash|fmha|attention|attn"  # The next ones are those of latents.
            r"|_absorbed_kernel|_absorb_kernel|_join_kernel|_expanded_kernel|_prepare_kernel|_values_kernel",
            re.IGNORECASE,
        ),
    ),
    (
        RECURRENCE,
        re.compile(r"_recurrence_kernel|_scan_kernel|_solve_kernel|_convolve_kernel|_keep_kernel|^_step_kernel"),
    ),
    (
        GEMM,
        re.compile(
            r"product_kernel|vector_kernel|_linear_kernel|dequantize_kernel|grouped|microscaled"
            r"|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|matmul|_mm_",
            re.IGNORECASE,
        ),
    ),
)
ENGINE_TRACK = 1_000_000  # No thread has this id.


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), OTHER)


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or a copy, in seconds of the profiler's clock."""

    name: str
    begin: float
    end: float
    is_copy: bool

    @property
    def is_input(self) -> bool:
        """Whether it may be the copy of a step's inputs."""
        return self.is_copy and "DtoH" not in self.name


@dataclass(slots=True)
class GPUTimeline:
    """The parts of the time, which add up to `seconds`: of overlapping kernels, the later one counts from the end of
    the earlier."""

    steps: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    kernels: dict[str, float] = field(default_factory=dict)  # seconds of each kernel by its name
    num_kernels: int = 0

    @property
    def idle_share(self) -> float:
        return (self.parts[HOST_GAP] + self.parts[LAUNCH]) / self.seconds


def device_activities(events: Iterable[Mapping[str, Any]]) -> list[Activity]:
    """The device activities of a Chrome trace, by start."""
    activities = [
        Activity(
            event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, is_copy=event["cat"] != "kernel"
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(activities, key=lambda activity: activity.begin)


def launch_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Host time spent in calls that launch kernels and graphs."""
    calls = (event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    return 1e-6 * float(sum(event["dur"] for event in calls if LAUNCH_CALLS.match(event["name"])))


def read_timeline(activities: Sequence[Activity], *, skip_steps: int, steps: int) -> GPUTimeline:
    """`steps` steps, without the first `skip_steps` ones.

    Idle time before the first activity of a step is a host gap; idle time between the kernels of a step is launch
    overhead. Steps that cannot be separated by their first kernel count all idle time as host gap.
    """
    starts = _starts(activities)
    if starts is None:
        starts, skip_steps = [0, len(activities)], 0
    else:
        steps = min(steps, len(starts) - 1 - skip_steps)
    timeline = GPUTimeline(steps)
    if timeline.steps < 1 or not activities:
        raise RuntimeError(f"the profiler saw {len(activities)} kernels, too few for {skip_steps + steps} steps")
    captured = len(starts) > 2
    last = min(skip_steps + timeline.steps, len(starts) - 1)
    first_of_steps = set(starts)
    # From the end of the activity before the first step to the end of the last step.
    covered = max((activity.end for activity in activities[: starts[skip_steps]]), default=activities[0].begin)
    timeline.seconds = -covered
    for index in range(starts[skip_steps], starts[last]):
        activity = activities[index]
        gap = max(0.0, activity.begin - covered)
        timeline.parts[HOST_GAP if index in first_of_steps or not captured else LAUNCH] += gap
        seconds = max(0.0, activity.end - max(activity.begin, covered))
        timeline.parts[OTHER if activity.is_copy else kind_of(activity.name)] += seconds
        timeline.kernels[activity.name] = timeline.kernels.get(activity.name, 0.0) + seconds
        timeline.num_kernels += not activity.is_copy
        covered = max(covered, activity.end)
    timeline.seconds += covered
    return timeline


def _starts(activities: Sequence[Activity]) -> list[int] | None:
    """Start indices of steps and the end of the last complete one; a copy right before the first kernel belongs to the
    step. None without such kernels."""
    firsts = [index for index, activity in enumerate(activities) if FIRST_KERNEL in activity.name]
    if len(firsts) < 2:
        return None
    return [index - (index > 0 and activities[index - 1].is_input) for index in firsts]


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
    spans = []
    for step in steps:
        name, details = f"step, {step.done.requests} requests", {"step": step.done.step}
        spans.append(Span(name, "engine", step.begin + shift, step.end + shift, details))
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
