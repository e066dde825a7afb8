"""Real runs of vLLM that LLMServingSim 2.0 recorded: read, simulated with vLLM's policy, and with ours.

A recording is a folder with `meta.json` (settings of the engine), `config.json` (the machine), `workload.jsonl` (when
each request came, its lengths and the ids of its prompt's blocks), `requests.jsonl` (when its first and last token
came; without it there is only a prediction) and the times of kernels, from which the steps are predicted. Nothing is
fitted to the times of requests. Where versions of LLMServingSim write less, `config.json` and vLLM's defaults count.
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
from chairlift.options import read_mapping, read_text
from chairlift_lab.common import model_shapes
from chairlift_lab.load.trace_files import TraceEntry, load_trace
from chairlift_lab.planning.machine import model_shape, read_config
from chairlift_lab.planning.prediction import ReplicaSettings, trace_arrivals
from chairlift_lab.simulator.kernel_times import Experts, KernelTimes
from chairlift_lab.simulator.outcome import RequestRecord, SimulationOutcome
from chairlift_lab.simulator.simulation import simulate
from chairlift_lab.simulator.together import simulate_together

MAX_META_MIB = 16
# What vLLM needs of its share of the memory besides weights and blocks. In the recording on an RTX 4090 it is 1.2 GB;
# it matters only where a recording says neither how many blocks there were nor what share they and the weights had.
OTHER_MEMORY = 1.2e9
BYTES_PER_VALUE = 2  # The sums that several devices exchange have 16 bits.
# What NCCL reaches over PCIe 5, by LLMServingSim's documentation: GiB/s and ns. It counts where a recording of several
# devices does not say how they are connected.
LINK: dict[str, Any] = {"link_bw": 16.37, "link_latency": 16_100}


@dataclass(frozen=True, slots=True)
class ServedRecording:
    entries: Sequence[TraceEntry]
    measured: Sequence[RequestRecord]  # none: there is nothing to compare a prediction with
    settings: ReplicaSettings
    cost: KernelTimes
    replicas: int
    together: bool = False  # whether the replicas compute each step together

    @classmethod
    def load(cls, folder: Path, model: str | None = None) -> ServedRecording:
        """Read a recording; `model` names the model's shape where its name in the recording is not known here."""
        meta, machine = (_read_json(folder / name) for name in ("meta.json", "config.json"))
        try:
            instances = [instance for node in machine["nodes"] for instance in node["instances"]]
            config = read_config(model) if model else _known_config(_model_name(meta, instances[0]))
            settings = _replica_settings(meta, instances[0], config)
            experts = _experts(config, instances[0])
            link = LINK | _measured_link(folder) | {name: machine[name] for name in LINK if machine.get(name)}
            exchange = _exchange(link, instances[0], config, experts)
            cost = KernelTimes.load(folder, int(config["num_hidden_layers"]), experts, **exchange)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter("recording", f"cannot read {str(folder)!r} ({error!r})") from None
        together = experts is not None and len(instances) > 1 and instances[0].get("dp_group") is not None
        measured = _measured(folder / "requests.jsonl")
        entries = load_trace(folder / "workload.jsonl", "recording")
        return cls(entries, measured, settings, cost, len(instances), together)

    def simulated(self, scheduler: str, *, learn_lengths: bool = False) -> SimulationOutcome:
        """The same traffic and step times with a scheduler."""
        settings = replace(self.settings, scheduler=scheduler, learn_lengths=learn_lengths)
        replicas = [settings.make(self.cost) for _ in range(self.replicas)]
        arrivals = trace_arrivals(list(self.entries))
        if self.together:
            return simulate_together(arrivals, [each.scheduler for each in replicas], self.cost.predict_together)
        return simulate(arrivals, replicas, Router("round-robin"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_text(path, "recording", MAX_META_MIB)))
    except (ValueError, TypeError) as error:
        raise InvalidParameter("recording", f"cannot read {str(path)!r} ({error})") from None


def _measured(path: Path) -> list[RequestRecord]:
    """What was measured of each request that was answered, from the moment when it was queued."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(read_text(path, "recording", MAX_META_MIB).splitlines(), 1):
        try:
            row = json.loads(line)
            times = (row["first_token_ts"], row["last_token_ts"])
            if None in times:
                continue
            records.append(RequestRecord(row["queued_ts"], row["input_toks"], row["output_toks"], 0, *times))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidParameter("recording", f"line {number} of {str(path)!r}: {error!r}") from None
    if not records:
        raise InvalidParameter("recording", f"{str(path)!r} has no requests in it")
    return records


def _model_name(meta: Mapping[str, Any], instance: Mapping[str, Any]) -> str:
    name = meta.get("model") or meta.get("engine_kwargs", {}).get("model") or instance.get("model_name")
    if not isinstance(name, str):
        raise InvalidParameter("model", "the recording does not name its model; give its config")
    return name


def _known_config(name: str) -> Mapping[str, Any]:
    """The config of a published model, by its id on the hub."""
    known = known_model(name)
    if known is not None and known.config:
        return known.config
    short = re.sub(r"^(meta-)?llama-(\d)(\.\d)?", r"llama\2", name.rstrip("/").rsplit("/", 1)[-1].lower())
    short = re.sub(r"-(instruct|base|chat|thinking|hf|v\d(\.\d)?|\d{4})(?=-|$)", "", short)
    shapes = model_shapes.SHAPES | json.loads(Path(model_shapes.__file__).with_name("recorded_models.json").read_text())
    if short not in shapes:
        raise InvalidParameter("model", f"the recording is one of {name}, whose shape is not known; give its config")
    config: Mapping[str, Any] = shapes[short]
    return config


def _replica_settings(
    meta: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any]
) -> ReplicaSettings:
    """The settings of one engine; what neither file says is vLLM's default."""
    cache = meta.get("kv_cache") or {}
    given = (instance, meta.get("engine_kwargs") or {}, meta.get("scheduler_config") or {})
    scheduling = {name: value for part in given for name, value in part.items() if value is not None}
    supported = {
        "policy": "fcfs",
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": True,
        "long_prefill_token_threshold": 0,
        "pipeline_parallel_size": 1,
        "pp_size": 1,
        "pd_type": None,
    }
    for name, value in supported.items():
        if scheduling.get(name, value) != value:
            problem = f"has {name} {scheduling[name]!r}, but only vLLM's policy fcfs with {value!r} is simulated"
            raise InvalidParameter("recording", problem)
    block_size = int(cache.get("block_size") or scheduling.get("block_size") or 16)
    blocks = cache.get("num_gpu_blocks")
    if not blocks and cache.get("num_kv_tokens"):
        blocks = cache["num_kv_tokens"] // block_size
    blocks = int(blocks or _blocks_that_fit(meta, instance, config, block_size))
    if blocks < 2:
        raise InvalidParameter("recording", "by its memory, no block of the KV cache fits beside the weights")
    caching = cache.get("enable_prefix_caching")
    return ReplicaSettings(
        num_blocks=blocks - 1,  # vLLM keeps one block that stands for none
        block_size=block_size,
        slots=int(scheduling.get("max_num_seqs", 256)),
        max_batch_tokens=int(scheduling.get("max_num_batched_tokens", 2048)),
        budget="fixed",
        prefix_caching=bool(scheduling.get("enable_prefix_caching", True) if caching is None else caching),
    )


def _blocks_that_fit(
    meta: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any], block_size: int
) -> int:
    """The blocks that the weights leave of a device's memory. vLLM's share of it also has all else in it; one in
    `config.json` that differs is that of weights and blocks alone."""
    memory, devices = instance["npu_mem"], int(instance.get("tp_size") or 1)
    shape, experts = model_shape(config, "bfloat16", "bfloat16"), _experts(config, instance)
    weights = (shape.weight_bytes - _expert_bytes(config)) / devices
    weights += _expert_bytes(config) / max(devices, experts.devices if experts else 1)
    settings = (meta.get("kv_cache") or {}) | (meta.get("engine_kwargs") or {})
    of_vllm = settings.get("gpu_memory_utilization") or 0.9
    share, size = memory.get("mem_util") or of_vllm, memory["mem_size"] * 2**30
    if share == of_vllm:
        size = (meta.get("hardware") or {}).get("device_total_memory_bytes") or size
    left = size * share - weights - (OTHER_MEMORY if share == of_vllm else 0.0)
    return int(left // (shape.kv_bytes_per_token / devices * block_size))


def _experts(config: Mapping[str, Any], instance: Mapping[str, Any]) -> Experts | None:
    """The mixture of a model; the experts of an engine are spread over its devices, or over those of its group."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return None
    devices = int(instance.get("ep_size") or 1)
    return Experts(int(count), int(config["num_experts_per_tok"]), devices)


def _expert_bytes(config: Mapping[str, Any]) -> float:
    count = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    layers = int(config["num_hidden_layers"])
    return BYTES_PER_VALUE * layers * int(count) * 3 * int(config["hidden_size"]) * int(inner)


def _measured_link(folder: Path) -> dict[str, Any]:
    """How the devices are connected, where `hardware.yaml` lies in the folder."""
    path = folder / "hardware.yaml"
    values = read_mapping(path, "recording").get("defaults") if path.exists() else None
    return {name: values[name] for name in LINK if values.get(name) is not None} if isinstance(values, dict) else {}


def _exchange(
    link: Mapping[str, Any], instance: Mapping[str, Any], config: Mapping[str, Any], experts: Experts | None
) -> dict[str, float]:
    """How long several devices take for what they exchange as a ring: they add up their results twice in each layer
    and once for the embeddings. With spread experts, rows are gathered before them, and their results added after."""
    layers, row = int(config["num_hidden_layers"]), BYTES_PER_VALUE * int(config["hidden_size"])
    shards, spread = int(instance.get("tp_size") or 1), experts.devices if experts else 1
    if shards > 1:
        devices, exchanges = shards, 2 * layers + 1
    elif spread > 1:
        devices, exchanges = spread, layers
    else:
        return {}
    bandwidth, latency = (_first(link[name]) for name in ("link_bw", "link_latency"))
    sent = 2 * (devices - 1) / devices * row
    return {
        "step_seconds": exchanges * 2 * (devices - 1) * latency * 1e-9,
        "seconds_per_token": exchanges * sent / (bandwidth * 2**30),
    }


def _first(value: Any) -> float:
    """A figure of a link, or that of the first of several dimensions."""
    return float(value[0] if isinstance(value, Sequence) else value)
