"""What a GPU did, from the list of its kernels: how long each kind of them took, and when it did nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.lab.common.step_work import ATTENTION, GEMM, SAMPLING

HOST_GAP, LAUNCH, OTHER = "host gap", "launch", "other"
PARTS = (GEMM, ATTENTION, SAMPLING, OTHER, LAUNCH, HOST_GAP)
FIRST_KERNEL = "begin_step_kernel"  # of every step of the GPU's runner
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")  # as torch's profiler calls them
LAUNCH_CALLS = re.compile(r"(cuda|cu)(GraphLaunch|LaunchKernel|LaunchKernelExC|LaunchKernelEx)(_.*)?$")

# By what stands in a kernel's name; the first that fits counts. cuBLAS calls its kernels many things.
_KINDS = (
    (SAMPLING, re.compile(r"_sample_kernel|argmax|multinomial", re.IGNORECASE)),
    (ATTENTION, re.compile(r"decode_kernel|_prefill_kernel|flash|fmha|attention|attn", re.IGNORECASE)),
    (
        GEMM,
        re.compile(
            r"_product_kernel|_linear_kernel|gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|matmul|_mm_|grouped",
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
class Timeline:
    """Where the time went. Kernels that overlap are not counted twice: the one that began first has its whole time,
    the next one what it took beyond that. So all parts add up to `seconds`."""

    steps: int
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    kernels: dict[str, float] = field(default_factory=dict)  # by name
    num_kernels: int = 0

    @property
    def idle_share(self) -> float:
        return (self.parts[HOST_GAP] + self.parts[LAUNCH]) / self.seconds


def device_activities(events: Iterable[Mapping[str, Any]]) -> list[Activity]:
    """From the events of a Chrome trace, in the order in which they began."""
    found = [
        Activity(
            event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, is_copy=event["cat"] != "kernel"
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found, key=lambda activity: activity.begin)


def launch_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Time that the host spent in the calls that start kernels and graphs."""
    calls = (event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    return 1e-6 * float(sum(event["dur"] for event in calls if LAUNCH_CALLS.match(event["name"])))


def read_timeline(activities: Sequence[Activity], *, skip_steps: int, steps: int) -> Timeline:
    """`steps` steps, without the first `skip_steps` ones.

    What the GPU waits before the first thing that belongs to a step is the host's: a step was not there in time. What
    it waits between the kernels of a step is the price of launching them. Where steps are not captured, hence cannot be
    told apart by their first kernel, everything that it waits is the host's.
    """
    starts = _starts(activities)
    if starts is None:
        starts, skip_steps = [0, len(activities)], 0
        timeline = Timeline(steps)
    else:
        timeline = Timeline(min(steps, len(starts) - 1 - skip_steps))
    if timeline.steps < 1 or not activities:
        raise RuntimeError(f"the profiler saw {len(activities)} kernels, too few for {skip_steps + steps} steps")
    captured = len(starts) > 2
    last = min(skip_steps + timeline.steps, len(starts) - 1)
    first_of_steps = set(starts)
    # From the end of what came before the first step to the end of the last one.
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
    """Where steps begin, and where the last one that is complete ends: with the copy of the inputs, if one comes right
    before the first kernel. None if there are no such kernels."""
    firsts = [index for index, one in enumerate(activities) if FIRST_KERNEL in one.name]
    if len(firsts) < 2:
        return None
    return [index - (index > 0 and _is_input(activities[index - 1])) for index in firsts]


def _is_input(activity: Activity) -> bool:
    return activity.is_copy and "DtoH" not in activity.name
