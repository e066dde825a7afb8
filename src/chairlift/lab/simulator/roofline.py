"""How long a step takes, from a model's shape and a device's figures alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chairlift.core.cost_model import StepShape
from chairlift.lab.simulator.devices import Device


class StepCost(Protocol):
    """What a simulation needs to know of a machine."""

    @property
    def seconds_per_position(self) -> float:
        """What it costs that a decode reads one position more, in a step of decodes alone."""
        ...

    def predict(self, shape: StepShape) -> float:
        """Seconds. The positions that decodes read are added last, so that sums come out the same to the last bit."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model costs; everything that a config.json tells about that."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    kv_bytes_per_token: int  # of all layers
    attention_flops_per_kv: int  # of all layers, for one token looking at one position
    bytes_per_weight: float
    tied_head: bool = True

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_weight

    @property
    def read_bytes(self) -> float:
        """Of one step: all weights, less an embedding table from which only single rows are looked up."""
        looked_up = 0 if self.tied_head else self.vocab_size * self.hidden_size
        return (self.num_parameters - looked_up) * self.bytes_per_weight

    @property
    def layer_parameters(self) -> int:
        """Those that every token is multiplied with; the head only sees tokens that are sampled from."""
        tables = 1 if self.tied_head else 2
        return self.num_parameters - tables * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Roofline:
    """Weights are read while they are multiplied, so the slower of the two counts; the cache is read besides."""

    model: ModelShape
    device: Device

    @property
    def seconds_per_position(self) -> float:
        return self.model.kv_bytes_per_token / self.device.bytes_per_second

    def predict(self, shape: StepShape) -> float:
        model, device = self.model, self.device
        sampled = shape.decode_tokens + shape.idle_rows
        flops = 2 * (model.layer_parameters * shape.tokens + model.vocab_size * model.hidden_size * sampled)
        products = max(model.read_bytes / device.bytes_per_second, flops / device.flops_per_second)
        prompts = shape.prefill_kv * model.attention_flops_per_kv / device.flops_per_second
        return device.step_seconds + products + prompts + self.seconds_per_position * shape.decode_kv
