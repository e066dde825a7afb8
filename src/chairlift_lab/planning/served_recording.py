"""Real runs of vLLM that LLMServingSim 2.0 recorded: read, simulated with vLLM's policy, and with ours.

A recording is a folder with `meta.json` (settings of the engine), `config.json` (the machine), `workload.jsonl` (when
each request came, its lengths and the ids of its prompt's blocks), `requests.jsonl` (when its first and last token
came) and the times of kernels, from which the steps are predicted. Nothing is fitted to the times of requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.cluster.routing.router import Router
from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import known_model
from chairlift.options import read_text
from chairlift_lab.common.model_shapes import SHAPES
from chairlift_lab.load.trace_files import TraceEntry, load_trace
from chairlift_lab.planning.machine import model_shape, read_config
from chairlift_lab.planning.prediction import ReplicaSettings, trace_arrivals
from chairlift_lab.simulator.kernel_times import Experts, KernelTimes
from chairlift_lab.simulator.outcome import RequestRecord, SimulationOutcome
from chairlift_lab.simulator.simulation import simulate

MAX_META_MIB = 16
# What vLLM needs of its share of the memory besides weights and blocks. In the recording on an RTX 4090 it is 1.2 GB;
# it matters only where a recording does not say how many blocks there were.
OTHER_MEMORY = 1.2e9
BYTES_PER_VALUE = 2  # The sums that several devices exchange have 16 bits.


@dataclass(frozen=True, slots=True)
class ServedRecording:
    entries: Sequence[TraceEntry]
    measured: Sequence[RequestRecord]
    settings: ReplicaSettings
    cost: KernelTimes
    replicas: int

    @classmethod
    def load(cls, folder: Path, model: str | None = None) -> ServedRecording:
        """Read a recording; `model` names the model's shape where its name in the recording is not known here."""
        meta, machine = (_read_json(folder / name) for name in ("meta.json", "config.json"))
        config = read_config(model) if model else _known_config(meta["model"])
        instances = [instance for node in machine["nodes"] for instance in node["instances"]]
        try:
            settings = _replica_settings(meta, instances[0], config)
            cost = KernelTimes.load(
                folder, int(config["num_hidden_layers"]), _experts(config), **_exchange(machine, instances[0], config)
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidParameter("recording", f"cannot read {str(folder)!r} ({error!r})") from None
        measured = _measured(folder / "requests.jsonl")
        return cls(load_trace(folder / "workload.jsonl"), measured, settings, cost, len(instances))

    def simulated(self, scheduler: str, *, learn_lengths: bool = False) -> SimulationOutcome:
        """The same traffic and step times with a scheduler."""
        settings = replace(self.settings, scheduler=scheduler, learn_lengths=learn_lengths)
        replicas = [settings.make(self.cost) for _ in range(self.replicas)]
        return simulate(trace_arrivals(list(self.entries)), replicas, Router("round-robin"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_text(path, "recording", MAX_META_MIB)))
    except (ValueError, TypeError) as error:
        raise InvalidParameter("recording", f"cannot read {str(path)!r} ({error})") from None


def _measured(path: Path) -> list[RequestRecord]:
    """What was measured of each request, from the moment when it was queued."""
    records = []
    for number, line in enumerate(read_text(path, "recording", MAX_META_MIB).splitlines(), 1):
        try:
            row = json.loads(line)
            times = (row["first_token_ts"], row["last_token_ts"])
            records.append(RequestRecord(row["queued_ts"], row["input_toks"], row["output_toks"], 0, *times))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidParameter("recording", f"line {number} of {str(path)!r}: {error!r}") from None
    if not records:
        raise InvalidParameter("recording", f"{str(path)!r} has no requests in it")
    return records


def _known_config(name: str) -> Mapping[str, Any]:
    """The config of a published model, by its id on the hub."""
    known = known_model(name)
    if known is not None and known.config:
        return known.config
    short = re.sub(r"^(meta-)?llama-(\d)(\.\d)?", r"llama\2", name.rsplit("/", 1)[-1].lower())
    short = re.sub(r"-(instruct|base|chat|thinking|hf|\d{4})(?=-|$)", "", short)
    if short not in SHAPES:
        raise InvalidParameter("model", f"the recording is one of {name}, whose shape is not known; give its config")
    return SHAPES[short]


def _replica_settings(
    meta: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any]
) -> ReplicaSettings:
    """The settings of one engine; what the recording does not say is vLLM's default."""
    cache = meta.get("kv_cache") or {}
    scheduling = meta.get("engine_kwargs", {}) | (meta.get("scheduler_config") or {})
    if scheduling.get("policy", "fcfs") != "fcfs" or not scheduling.get("enable_chunked_prefill", True):
        raise InvalidParameter("recording", "only vLLM's policy fcfs with chunked prefill is simulated")
    block_size = int(cache.get("block_size", 16))
    blocks = cache.get("num_gpu_blocks") or _blocks_that_fit(meta, instance, config, block_size)
    return ReplicaSettings(
        num_blocks=int(blocks) - 1,  # vLLM keeps one block that stands for none
        block_size=block_size,
        slots=int(scheduling.get("max_num_seqs", 256)),
        max_batch_tokens=int(scheduling.get("max_num_batched_tokens", 2048)),
        prefix_caching=bool(cache.get("enable_prefix_caching", True)),
    )


def _blocks_that_fit(
    meta: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any], block_size: int
) -> int:
    memory, devices = instance["npu_mem"], int(instance.get("tp_size", 1))
    size = meta.get("hardware", {}).get("device_total_memory_bytes") or memory["mem_size"] * 2**30
    shape = model_shape(config, "bfloat16", "bfloat16")
    left = size * memory.get("mem_util", 0.9) - shape.weight_bytes / devices - OTHER_MEMORY
    return int(left // (shape.kv_bytes_per_token / devices * block_size))


def _experts(config: Mapping[str, Any]) -> Experts | None:
    count = config.get("num_experts") or config.get("num_local_experts")
    return Experts(int(count), int(config["num_experts_per_tok"])) if count else None


def _exchange(machine: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, float]:
    """How long several devices take to add up their results: twice in each layer, as a ring."""
    devices = int(instance.get("tp_size", 1))
    if devices == 1:
        return {}
    sums = 2 * int(config["num_hidden_layers"])
    sent = 2 * (devices - 1) / devices * BYTES_PER_VALUE * int(config["hidden_size"])
    return {
        "step_seconds": sums * 2 * (devices - 1) * machine["link_latency"] * 1e-9,
        "seconds_per_token": sums * sent / (machine["link_bw"] * 1e9),
    }
