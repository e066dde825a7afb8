"""The memory that a model's weights will take on a CPU, stated and checked before they are loaded."""

from __future__ import annotations

import logging

import torch

from chairlift.byte_sizes import format_bytes, parse_bytes
from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.gguf.blocks import GGUFWeight
from chairlift.models import format_obstacles, is_native
from chairlift.models.weight_sizes import weight_bytes
from chairlift.runner.device_memory import free_memory

log = logging.getLogger("chairlift")

SMALLER = ("int8", "int4")  # formats to suggest, if they are smaller
CPU = torch.device("cpu")


def expected_weight_bytes(checkpoint: Checkpoint, quantization: str, dtype: torch.dtype) -> int:
    """About the bytes of the weights in memory."""
    if quantization != "checkpoint":
        return weight_bytes(checkpoint.config, FORMATS.get(quantization), dtype, "cpu")
    if checkpoint.format != "gguf" or not is_native(checkpoint.config):
        return checkpoint.num_bytes
    total = 0
    for _, weight in checkpoint.stored():
        if isinstance(weight, GGUFWeight) and BlockWeight.accepts([weight], dtype, CPU):
            total += BlockWeight.bytes_of(weight)
        else:
            total += weight.shape.numel() * dtype.itemsize
    return total


def require_memory(checkpoint: Checkpoint, num_bytes: int, dtype: torch.dtype, config: EngineConfig) -> None:
    """State what loading takes; raise if the machine does not have it."""
    kv_bytes = 0 if config.kv_memory is None else parse_bytes("kv_memory", config.kv_memory)
    free, needed = free_memory(CPU), num_bytes + kv_bytes
    parts = f"{format_bytes(num_bytes)} of weights"
    if kv_bytes:
        parts += f" + {format_bytes(kv_bytes)} of KV cache = {format_bytes(needed)}"
    if needed <= free:
        log.info(f"memory     {parts}, of {format_bytes(free)} that are free")
        return
    if num_bytes < free:
        left = f"the {format_bytes(free - num_bytes)} that are free beside {format_bytes(num_bytes)} of weights"
        raise InvalidParameter("kv_memory", f"{format_bytes(kv_bytes)} is more than {left}")
    smaller = [
        f"--quantization {name} ({format_bytes(size)})"
        for name in SMALLER
        if not format_obstacles(checkpoint.config, name, dtype, CPU)
        and (size := weight_bytes(checkpoint.config, FORMATS.get(name), dtype, "cpu")) < num_bytes
    ]
    ways_out = " or ".join(["a smaller model", *smaller])
    raise UnsupportedModel(
        f"{checkpoint.path}: too little memory: {parts}, but {format_bytes(free)} are free; choose {ways_out}"
    )
