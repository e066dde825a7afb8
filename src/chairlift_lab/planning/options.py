"""Options of `chairlift simulate` and `chairlift plan`: a model, a device and targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.cluster.autoscaling import AutoscalingSettings
    from chairlift.cluster.routing.router import Router
    from chairlift_lab.planning.run import MemoryBudget
    from chairlift_lab.simulator.devices import Device
    from chairlift_lab.simulator.figures import Targets
    from chairlift_lab.simulator.roofline import ModelShape

machine_option, _target, _fleet = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model and device", "Targets", "Replicas")
)
INGRESS_BY = ("turn", "tenant")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    model: Annotated[
        str,
        machine_option(
            help="config.json, a folder with one, a GGUF file, or a name: qwen3-0.6b, llama3-8b, smollm2-135m."
        ),
    ] = "llama3-8b"
    device: Annotated[str, machine_option(help="h200, h100, a100, l4, cpu or custom.")] = "h200"
    dtype: Annotated[str, machine_option(help="Of the weights: bfloat16, float16, float32, int8, int4.")] = "bfloat16"
    kv_dtype: Annotated[str, machine_option(help="Of the cache: bfloat16, float16, float32, int8, fp8.")] = "bfloat16"
    bandwidth: Annotated[float | None, machine_option(help="GB/s of the device instead of what is known.")] = None
    tflops: Annotated[float | None, machine_option(help="TFLOP/s of the device instead.")] = None
    memory: Annotated[float | None, machine_option(help="GB of the device instead.")] = None
    host_bandwidth: Annotated[float | None, machine_option(help="GB/s to host memory, for swapping, instead.")] = None

    def resolve(self, block_size: int = 16) -> tuple[ModelShape, Device, MemoryBudget]:
        from chairlift_lab.planning.model_shape import model_shape, read_config
        from chairlift_lab.planning.run import MemoryBudget
        from chairlift_lab.simulator.devices import device_named

        model, _ = model_shape(read_config(self.model), self.dtype, self.kv_dtype)
        device = device_named(
            self.device,
            bytes_per_second=_times(self.bandwidth, 1e9),
            flops_per_second=_times(self.tflops, 1e12),
            memory_bytes=_times(self.memory, 1e9),
            host_bytes_per_second=_times(self.host_bandwidth, 1e9),
        )
        return model, device, MemoryBudget.of(model, device, block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    target_ttft_ms: Annotated[float | None, _target(help="Time to first token.")] = None
    target_tpot_ms: Annotated[float | None, _target(help="Time per output token after the first.")] = None
    target_e2e_ms: Annotated[float | None, _target(help="Whole answer.")] = None

    def resolve(self) -> Targets:
        from chairlift_lab.simulator.figures import Targets

        for name in ("target_ttft_ms", "target_tpot_ms", "target_e2e_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidParameter(name, f"must be above 0, got {value}")
        seconds = (_times(value, 1e-3) for value in (self.target_ttft_ms, self.target_tpot_ms, self.target_e2e_ms))
        return Targets(*seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    replicas: Annotated[int, _fleet(help="Number of engines, at the start.")] = 1
    router: Annotated[str, _fleet(help="round-robin, least-loaded or prefix-affine.")] = "least-loaded"
    ingresses: Annotated[int, _fleet(help="Ingresses, each with a router of its own.")] = 1
    ingress_by: Annotated[
        str, _fleet(help="Which ingress gets a request: turn, or tenant (by the first tokens of its prompt).")
    ] = "turn"
    max_replicas: Annotated[int | None, _fleet(help="Autoscale up to this many.", show_default="no scaling")] = None
    min_replicas: Annotated[int, _fleet(help="Autoscale down to this many.")] = 1
    cold_start: Annotated[float, _fleet(help="Seconds until a new replica answers.")] = 20.0
    down_delay: Annotated[
        float, _fleet(help="Seconds for which fewer replicas must suffice before any is removed.")
    ] = 120.0
    target_used: Annotated[float, _fleet(help="Share of KV blocks in use at which to add replicas.")] = 0.7
    price: Annotated[float | None, _fleet(help="Per replica and hour, for the cost of tokens.")] = None

    def check(self) -> None:
        if self.replicas < 1:
            raise InvalidParameter("replicas", f"must be at least 1, got {self.replicas}")
        if self.ingresses < 1:
            raise InvalidParameter("ingresses", f"must be at least 1, got {self.ingresses}")
        if self.ingress_by not in INGRESS_BY:
            choices = ", ".join(INGRESS_BY)
            raise InvalidParameter("ingress_by", f"must be one of {choices}, got {self.ingress_by!r}")
        if self.ingress_by == "tenant":
            from chairlift.cluster.routing.policies import ROUTERS

            if self.ingresses == 1 or not ROUTERS.get(self.router).reads_prefixes:
                raise InvalidParameter("ingress_by", "tenant needs several ingresses and the router prefix-affine")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidParameter("max_replicas", f"must be at least replicas ({self.replicas})")
        if self.price is not None and not self.price >= 0:
            raise InvalidParameter("price", f"must not be negative, got {self.price}")

    def make_router(self) -> Router:
        from chairlift.cluster.routing.router import Router
        from chairlift_lab.simulator.fleet import Ingresses

        if self.ingresses == 1:
            return Router(self.router)
        return Ingresses(self.router, self.ingresses, by_tenant=self.ingress_by == "tenant")

    def autoscaling(self, targets: Targets) -> AutoscalingSettings | None:
        """The settings of the autoscaler; None if the number of replicas is fixed."""
        from chairlift.cluster.autoscaling import AutoscalingSettings

        if self.max_replicas is None:
            return None
        settings = AutoscalingSettings(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            target_used=self.target_used,
            target_tpot=targets.tpot,
            cold_start=self.cold_start,
            down_delay=self.down_delay,
        )
        return settings if targets.ttft is None else replace(settings, target_ttft=targets.ttft)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
