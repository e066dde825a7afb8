"""A model and a device for `chairlift simulate` and `chairlift plan`: their figures, and what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift_lab.common.model_shapes import SHAPES, read_json_config
from chairlift_lab.simulator.step_cost import Device, ModelShape, device_named

if TYPE_CHECKING:
    from chairlift.attention.placement import Placement
    from chairlift.engine.memory_plan import MemoryPlan

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9  # the rest is for activations
STATES_SHARE = 0.5  # the largest share of what the weights leave, as in `engine/memory_plan.py`
STEP_TOKENS = 8192  # the most tokens of a step, as of a simulated replica
MAX_REQUESTS = 256  # requests of one replica

machine_option = partial(typer.Option, rich_help_panel="Model and device")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    model: Annotated[
        str,
        machine_option(
            help="config.json, a folder with one, a GGUF file, a Hugging Face id, or a name of `chairlift models`."
        ),
    ] = "llama3-8b"
    device: Annotated[str, machine_option(help="h200, h100, a100, l4, cpu or custom.")] = "h200"
    dtype: Annotated[str, machine_option(help="Of the weights: bfloat16, float16, float32, int8, int4.")] = "bfloat16"
    kv_dtype: Annotated[str, machine_option(help="Of the cache: bfloat16, float16, float32, int8, fp8.")] = "bfloat16"
    bandwidth: Annotated[float | None, machine_option(help="GB/s of the device instead of what is known.")] = None
    tflops: Annotated[float | None, machine_option(help="TFLOP/s of the device instead.")] = None
    memory: Annotated[float | None, machine_option(help="GB of the device instead.")] = None
    host_bandwidth: Annotated[float | None, machine_option(help="GB/s to host memory, for swapping, instead.")] = None

    def resolve(self, block_size: int = BLOCK_SIZE) -> tuple[ModelShape, Device, MemoryBudget]:
        config = read_config(self.model)
        model = model_shape(config, self.dtype, self.kv_dtype)
        device = device_named(
            self.device,
            bytes_per_second=times(self.bandwidth, 1e9),
            flops_per_second=times(self.tflops, 1e12),
            memory_bytes=times(self.memory, 1e9),
            host_bytes_per_second=times(self.host_bandwidth, 1e9),
        )
        return model, device, MemoryBudget.of(model, device, block_size, kv_places(config, self.kv_dtype))


def times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def read_config(name: str) -> Mapping[str, Any]:
    """Read the config of a config.json, a folder, a GGUF file, a known model or a shape of `bench shapes`."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    if (path / "config.json").exists() or (path.suffix == ".json" and path.exists()):
        return read_json_config(path, "model")
    from chairlift.loading.resolve import read_model_config

    return read_model_config(name).config


def model_shape(config: Mapping[str, Any], weights: str, kv_dtype: str) -> ModelShape:
    """The shape of a model with weights and a KV cache of these types."""
    from chairlift.engine.memory_plan import bytes_per_token
    from chairlift.engine.settings import KV_DTYPES
    from chairlift.models import describe

    for parameter, name, choices in (("dtype", weights, BYTES_PER_WEIGHT), ("kv_dtype", kv_dtype, KV_DTYPES)):
        if name not in choices:
            raise InvalidParameter(parameter, f"unknown type {name!r}; choose from {', '.join(choices)}")
    info = describe(config)
    layers = info.attention_layers
    return ModelShape(
        num_parameters=info.num_parameters,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        kv_bytes_per_token=bytes_per_token(layers, KV_DTYPES[kv_dtype]),
        attention_flops_per_kv=sum(2 * layer.num_heads * (layer.head_dim + layer.value_dim) for layer in layers),
        bytes_per_weight=BYTES_PER_WEIGHT[weights],
        tied_head=bool(config.get("tie_word_embeddings", False)),
        state_bytes=sum(layer.num_bytes for layer in info.recurrent_layers),
    )


@dataclass(frozen=True, slots=True)
class KVPlaces:
    """Where a model's layers keep keys and values, and what of them a block is memory for."""

    placement: Placement
    bytes_per_place: int  # keys and values of one token in the layers that a block is memory for
    max_len: int


def kv_places(config: Mapping[str, Any], kv_dtype: str) -> KVPlaces | None:
    """The places of a model with groups of layers that see different tokens; None: a block is memory for all layers."""
    from chairlift.attention.placement import place_layers
    from chairlift.engine.memory_plan import bytes_per_token
    from chairlift.engine.settings import KV_DTYPES
    from chairlift.models import describe

    info = describe(config)
    if info.recurrent_layers or not info.attention_layers:
        return None
    placement = place_layers(info.attention_layers, info.max_len)
    if placement.num_tables == 1 and placement.reaches[0].is_full:
        return None
    return KVPlaces(placement, bytes_per_token(placement.shapes, KV_DTYPES[kv_dtype]), info.max_len)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What the weights leave of a device's memory."""

    kv_bytes: float
    num_blocks: int
    num_tokens: int
    num_states: int | None  # sequences whose recurrent states fit; None: the model has no recurrent layers
    groups: MemoryPlan | None = None  # the engine's plan for the same memory, if layers see different tokens

    @classmethod
    def of(cls, model: ModelShape, device: Device, block_size: int, places: KVPlaces | None = None) -> MemoryBudget:
        """The states of up to `MAX_REQUESTS` requests get at most half of what the weights leave."""
        left = device.memory_bytes * MEMORY_SHARE - model.weight_bytes
        states = None
        if model.state_bytes:
            states = min(MAX_REQUESTS, int(left * STATES_SHARE // model.state_bytes))
            left -= max(0, states) * model.state_bytes
        blocks = int(left // max(1, model.kv_bytes_per_token * block_size))
        if blocks < 1 or states == 0:
            # The weights, and at least one block of the cache and one state, split evenly.
            least = model.weight_bytes + model.kv_bytes_per_token * block_size + model.state_bytes / STATES_SHARE
            needed = max(1, math.ceil(least / (device.memory_bytes * MEMORY_SHARE)))
            problem = (
                f"{device.memory_bytes / 1e9:.0f} GB leave no room beside {model.weight_bytes / 1e9:.1f} GB of weights"
            )
            solution = f"it needs {needed} such devices, a larger one, or a smaller type of weights"
            raise InvalidParameter("device", f"{problem}; {solution}")
        groups = None if places is None else _plan_groups(model, places, left, block_size)
        return cls(left, blocks, blocks * block_size, states, groups)

    def requests_of(self, length: int) -> int:
        """How many requests of `length` tokens fit."""
        if self.groups is not None:
            return int(self.groups.sequences(length))
        fitting = self.num_tokens // length
        return fitting if self.num_states is None else min(fitting, self.num_states)

    def blocks_of_one_table(self, length: int) -> int:
        """The blocks of all layers in which one table holds as many requests of `length` tokens as there is room for.

        The simulator counts one table for each request, so windows are more blocks there."""
        if self.groups is None:
            return self.num_blocks
        blocks = -(-length // self.groups.block_size)
        return max(self.num_blocks, int(self.groups.sequences(length) * blocks))


def _plan_groups(model: ModelShape, places: KVPlaces, kv_bytes: float, block_size: int) -> MemoryPlan:
    """What the engine makes of this much memory for keys and values."""
    from chairlift.engine.memory_plan import MemoryPlan

    return MemoryPlan(
        int(model.weight_bytes),
        model.kv_bytes_per_token,
        block_size,
        int(kv_bytes // (places.bytes_per_place * block_size)),
        places.max_len,
        "what the weights leave",
        placement=places.placement,
        bytes_per_place=places.bytes_per_place,
        step_tokens=STEP_TOKENS,
    )
