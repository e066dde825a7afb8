"""The duration of a step, from the shape of a model and the figures of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chairlift.core.cost_model import StepShape
from chairlift_lab.simulator.devices import Device


class StepCost(Protocol):
    """The cost model of a simulation."""

    @property
    def seconds_per_position(self) -> float:
        """The time per KV position in a step with decodes only."""
        ...

    def predict(self, shape: StepShape) -> float:
        """Predict the seconds of a step. The term of `decode_kv` is added last, so that sums are equal to the last
        bit."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its cost."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    kv_bytes_per_token: int  # the sum over all layers
    attention_flops_per_kv: int  # the sum over all layers, per token and KV position
    bytes_per_weight: float
    tied_head: bool = True
    state_bytes: int = 0  # the states of one sequence, in all recurrent layers

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_weight

    @property
    def read_bytes(self) -> float:
        """Bytes of weights read in one step: all but an untied embedding table."""
        looked_up = 0 if self.tied_head else self.vocab_size * self.hidden_size
        return (self.num_parameters - looked_up) * self.bytes_per_weight

    @property
    def layer_parameters(self) -> int:
        """Parameters that every token is multiplied with; the head only gets tokens that are sampled."""
        tables = 1 if self.tied_head else 2
        return self.num_parameters - tables * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step time: the slower of reading and multiplying the weights, plus reading the KV cache."""

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
