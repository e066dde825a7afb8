"""A model and a device for `chairlift simulate` and `chairlift plan`: their figures, and what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.errors import InvalidParameter
from chairlift_lab.common.model_shapes import SHAPES, read_json_config
from chairlift_lab.simulator.step_cost import Device, ModelShape, device_named

BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
BLOCK_SIZE = 16
MEMORY_SHARE = 0.9  # the rest is for activations
STATES_SHARE = 0.5  # the largest share of what the weights leave, as in `engine/memory_plan.py`
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
        model = model_shape(read_config(self.model), self.dtype, self.kv_dtype)
        device = device_named(
            self.device,
            bytes_per_second=times(self.bandwidth, 1e9),
            flops_per_second=times(self.tflops, 1e12),
            memory_bytes=times(self.memory, 1e9),
            host_bytes_per_second=times(self.host_bandwidth, 1e9),
        )
        return model, device, MemoryBudget.of(model, device, block_size)


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
class MemoryBudget:
    """What the weights leave of a device's memory."""

    kv_bytes: float
    num_blocks: int
    num_tokens: int
    num_states: int | None  # sequences whose recurrent states fit; None: the model has no recurrent layers

    @classmethod
    def of(cls, model: ModelShape, device: Device, block_size: int) -> MemoryBudget:
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
        return cls(left, blocks, blocks * block_size, states)

    def requests_of(self, length: int) -> int:
        """How many requests of `length` tokens fit."""
        fitting = self.num_tokens // length
        return fitting if self.num_states is None else min(fitting, self.num_states)
