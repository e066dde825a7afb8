"""`chairlift profile`: the profile of every batch size, the ceilings of the machine, and the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.engine.startup import StartedEngine
from chairlift.progress import Note
from chairlift_lab.common.floor import Ceilings, ceilings_for
from chairlift_lab.profile.step_profile import BatchProfile, ProfileSettings


@dataclass(frozen=True, slots=True)
class Profiled:
    batches: list[BatchProfile]
    ceilings: Ceilings
    trace: list[dict[str, Any]]


def profile_engine(
    started: StartedEngine, settings: ProfileSettings, prefill_tokens: int, note: Note = lambda text: None
) -> Profiled:
    """Profile every batch size; `prefill_tokens` is the largest number of prompt tokens of a step."""
    settings.check(started.engine, prefill_tokens)
    note("measuring what the machine can do")
    ceilings = ceilings_for(started.runner.model)
    if started.runner.model.device.type == "cuda":
        from chairlift_lab.profile.gpu import profile_on_gpu

        batches, trace = profile_on_gpu(started, settings, note)
    else:
        from chairlift_lab.profile.cpu import profile_on_cpu

        batches, trace = profile_on_cpu(started, settings, note)
    return Profiled(batches, ceilings, trace)
