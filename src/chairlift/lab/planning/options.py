"""Options of `chairlift simulate` and `chairlift plan`: a model, a device and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.lab.planning.run import MemoryBudget
    from chairlift.lab.simulator.devices import Device
    from chairlift.lab.simulator.figures import Targets
    from chairlift.lab.simulator.roofline import ModelShape

MACHINE, _TARGETS = "Model and device", "Targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    model: Annotated[
        str,
        typer.Option(
            help="config.json, a folder with one, a GGUF file, or a name: qwen3-0.6b, llama3-8b, smollm2-135m.",
            rich_help_panel=MACHINE,
        ),
    ] = "llama3-8b"
    device: Annotated[str, typer.Option(help="h200, h100, a100, l4, cpu or custom.", rich_help_panel=MACHINE)] = "h200"
    dtype: Annotated[
        str, typer.Option(help="Of the weights: bfloat16, float16, float32, int8, int4.", rich_help_panel=MACHINE)
    ] = "bfloat16"
    kv_dtype: Annotated[
        str, typer.Option(help="Of the cache: bfloat16, float16, float32, int8.", rich_help_panel=MACHINE)
    ] = "bfloat16"
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of the device instead of what is known.", rich_help_panel=MACHINE)
    ] = None
    tflops: Annotated[float | None, typer.Option(help="TFLOP/s of the device instead.", rich_help_panel=MACHINE)] = None
    memory: Annotated[float | None, typer.Option(help="GB of the device instead.", rich_help_panel=MACHINE)] = None
    host_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s to host memory, for swapping, instead.", rich_help_panel=MACHINE)
    ] = None

    def resolve(self) -> tuple[ModelShape, Device, MemoryBudget]:
        from chairlift.lab.planning.model_shape import BYTES_PER_WEIGHT, model_shape, read_config
        from chairlift.lab.planning.run import MemoryBudget
        from chairlift.lab.simulator.devices import device_named

        if self.kv_dtype not in BYTES_PER_WEIGHT:
            choices = ", ".join(BYTES_PER_WEIGHT)
            raise InvalidParameter("kv_dtype", f"unknown type {self.kv_dtype!r}; choose from {choices}")
        model, _ = model_shape(read_config(self.model), self.dtype, BYTES_PER_WEIGHT[self.kv_dtype])
        device = device_named(
            self.device,
            bytes_per_second=_times(self.bandwidth, 1e9),
            flops_per_second=_times(self.tflops, 1e12),
            memory_bytes=_times(self.memory, 1e9),
            host_bytes_per_second=_times(self.host_bandwidth, 1e9),
        )
        return model, device, MemoryBudget.of(model, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    target_ttft_ms: Annotated[float | None, typer.Option(help="Time to first token.", rich_help_panel=_TARGETS)] = None
    target_tpot_ms: Annotated[
        float | None, typer.Option(help="Time per output token after the first.", rich_help_panel=_TARGETS)
    ] = None
    target_e2e_ms: Annotated[float | None, typer.Option(help="Whole answer.", rich_help_panel=_TARGETS)] = None

    def resolve(self) -> Targets:
        from chairlift.lab.simulator.figures import Targets

        for name in ("target_ttft_ms", "target_tpot_ms", "target_e2e_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidParameter(name, f"must be above 0, got {value}")
        seconds = (_times(value, 1e-3) for value in (self.target_ttft_ms, self.target_tpot_ms, self.target_e2e_ms))
        return Targets(*seconds)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
