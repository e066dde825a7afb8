"""Builds the tiers behind the prefix cache of an engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chairlift.config import EngineConfig
from chairlift.core.kv.tiers import Tier, Tiers
from chairlift.errors import InvalidParameter
from chairlift.options import format_bytes, parse_bytes
from chairlift.runner.base import ModelRunner
from chairlift.runner.memory import free_memory
from chairlift.runner.tiers.device import HostParts, part_tensors
from chairlift.runner.tiers.mover import DISK, HOST, ThreadedMover
from chairlift.runner.tiers.stores import OVERHEAD, DiskStore, HostStore

log = logging.getLogger("chairlift")

DEFAULT_DISK_SIZE = "50GiB"


def make_tiers(config: EngineConfig, runner: ModelRunner, weights: str, obstacle: str) -> Tiers | None:
    """Open the stores that the config asks for; None if it asks for none. `weights` tells the weights of the model from
    all others; `obstacle` is why its cache cannot have tiers, if it cannot."""
    if config.kv_host_memory is None and config.kv_disk is None:
        return None
    if runner.model.device.type != "cpu":
        obstacle = "needs a CPU: tiers cannot be loaded to other devices yet"
    if obstacle:
        raise InvalidParameter("kv_disk" if config.kv_host_memory is None else "kv_host_memory", obstacle)
    device = HostParts(part_tensors(runner.storage, runner.states))
    sizes, tiers = device.sizes, list[Tier]()
    host = disk = None
    if config.kv_host_memory is not None:
        host = HostStore()
        tiers.append(Tier(HOST, _host_bytes(config.kv_host_memory, sizes)))
    if config.kv_disk is not None:
        limit = parse_bytes("kv_disk_size", config.kv_disk_size or DEFAULT_DISK_SIZE)
        _require_room("kv_disk_size", limit, sizes)
        disk = DiskStore(Path(config.kv_disk), limit, _about(config, runner, weights, sizes), sizes)
        tiers.append(Tier(DISK, limit, disk.found, overhead=OVERHEAD))
    for tier in tiers:
        known = f", {len(tier):,} parts known from earlier" if len(tier) else ""
        log.info(f"tier       {tier.name}: {format_bytes(tier.num_bytes)}{known}")
    return Tiers(tiers, ThreadedMover(device, host, disk), sizes)


def _host_bytes(given: int | str, sizes: Mapping[str, int]) -> int:
    num_bytes = parse_bytes("kv_host_memory", given)
    _require_room("kv_host_memory", num_bytes, sizes)
    free = free_memory(torch.device("cpu"))
    if num_bytes > free:
        problem = f"{format_bytes(num_bytes)} is more than the {format_bytes(free)} that are free on the host"
        raise InvalidParameter("kv_host_memory", f"{problem}; lower it")
    return num_bytes


def _require_room(parameter: str, num_bytes: int, sizes: Mapping[str, int]) -> None:
    needed = sum(sizes.values()) + OVERHEAD * len(sizes)
    if num_bytes < needed:
        raise InvalidParameter(parameter, f"is too little: one block takes {format_bytes(needed)}")


def _about(config: EngineConfig, runner: ModelRunner, weights: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """All that the bytes of a part depend on besides the tokens up to its end."""
    if not weights:
        raise InvalidParameter("kv_disk", "needs a model whose weights were loaded from a checkpoint")
    return {
        "weights": weights,  # The version of the code is in it.
        "quantization": runner.model.quantization,
        "dtype": str(runner.model.dtype),
        "kv_dtype": str(runner.storage.keys[0].dtype),
        "block_size": config.block_size,
        "speculate": config.speculate,
        "parts": dict(sizes),
        "tensors": [_form(own) for own in part_tensors(runner.storage, runner.states).values()],
    }


def _form(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{tensor.dtype} {list(tensor.shape[1:])}" for tensor in tensors]
