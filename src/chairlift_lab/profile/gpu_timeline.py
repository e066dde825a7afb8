"""Splits a GPU's time by kind of kernel, launch gaps and host gaps, from the profiler's list of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift_lab.common.step_work import ATTENTION, GEMM, SAMPLING

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
            r"decode_kernel|_prefill_kernel|flash|fmha|attention|attn"  # and those of latents
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


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), OTHER)


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or a copy, in seconds of the profiler's clock."""

    name: str
    begin: float
    end: float
    is_copy: bool


@dataclass(slots=True)
class GPUTimeline:
    """The parts of the time, which add up to `seconds`: of overlapping kernels, the later one counts from the end of
    the earlier."""

    steps: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    kernels: dict[str, float] = field(default_factory=dict)  # by name
    num_kernels: int = 0

    @property
    def idle_share(self) -> float:
        return (self.parts[HOST_GAP] + self.parts[LAUNCH]) / self.seconds


def device_activities(events: Iterable[Mapping[str, Any]]) -> list[Activity]:
    """The device activities of a Chrome trace, by start."""
    found = [
        Activity(
            event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, is_copy=event["cat"] != "kernel"
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found, key=lambda activity: activity.begin)


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
        timeline = GPUTimeline(steps)
    else:
        timeline = GPUTimeline(min(steps, len(starts) - 1 - skip_steps))
    if timeline.steps < 1 or not activities:
        raise RuntimeError(f"the profiler saw {len(activities)} kernels, too few for {skip_steps + steps} steps")
    captured = len(starts) > 2
    last = min(skip_steps + timeline.steps, len(starts) - 1)
    first_of_steps = set(starts)
    # From the end of the activity before the first step to the end of the last step.
    covered = max((one.end for one in activities[: starts[skip_steps]]), default=activities[0].begin)
    timeline.seconds = -covered
    for index in range(starts[skip_steps], starts[last]):
        one = activities[index]
        gap = max(0.0, one.begin - covered)
        timeline.parts[HOST_GAP if index in first_of_steps or not captured else LAUNCH] += gap
        seconds = max(0.0, one.end - max(one.begin, covered))
        timeline.parts[OTHER if one.is_copy else kind_of(one.name)] += seconds
        timeline.kernels[one.name] = timeline.kernels.get(one.name, 0.0) + seconds
        timeline.num_kernels += not one.is_copy
        covered = max(covered, one.end)
    timeline.seconds += covered
    return timeline


def _starts(activities: Sequence[Activity]) -> list[int] | None:
    """Start indices of steps and the end of the last complete one; a copy right before the first kernel belongs to the
    step. None without such kernels."""
    firsts = [index for index, one in enumerate(activities) if FIRST_KERNEL in one.name]
    if len(firsts) < 2:
        return None
    return [index - (index > 0 and _is_input(activities[index - 1])) for index in firsts]


def _is_input(activity: Activity) -> bool:
    return activity.is_copy and "DtoH" not in activity.name
