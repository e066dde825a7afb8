"""`chairlift profile`: the profile of every batch size, the ceilings of the machine, and the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.bench.floor import Ceilings
from chairlift.bench.step_profile import BatchProfile, ProfileSettings
from chairlift.bench.timing import Note
from chairlift.execution.startup import StartedEngine
from chairlift.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class Profiled:
    batches: list[BatchProfile]
    ceilings: Ceilings
    trace: list[dict[str, Any]]


def profile_engine(started: StartedEngine, settings: ProfileSettings, note: Note = lambda text: None) -> Profiled:
    settings.check(started.engine)
    note("measuring what the machine can do")
    ceilings = ceilings_for(started.runner.model)
    if started.runner.model.device.type == "cuda":
        from chairlift.bench.gpu_profile import profile_on_gpu

        batches, trace = profile_on_gpu(started, settings, note)
    else:
        from chairlift.bench.cpu_profile import profile_on_cpu

        batches, trace = profile_on_cpu(started, settings, note)
    return Profiled(batches, ceilings, trace)


def ceilings_for(model: CausalLM) -> Ceilings:
    """Of the device that this model runs on, in its precision."""
    if model.device.type == "cuda":
        return Ceilings.measure(model.device, model.dtype)
    from chairlift.bench.cpu_ceilings import cpu_ceilings

    return cpu_ceilings(model.dtype, getattr(model, "quantization", "none"))
