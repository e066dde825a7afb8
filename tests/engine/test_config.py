from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.settings import Machine, for_latency, for_throughput, resolve_machine
from chairlift.engine.startup import load_engine, load_model
from chairlift.errors import InvalidParameter
from chairlift_lab.planning.prediction import ReplicaSettings
from tests.tiny import write_tiny_checkpoint


def test_offline_steps_on_a_gpu_are_larger():
    machine = Machine(num_gpus=1, num_threads=4)
    config = EngineConfig(device="cuda")
    assert for_throughput(config, machine).max_batch_tokens == 2 * resolve_machine(config, machine).max_batch_tokens
    chosen = EngineConfig(device="cuda", max_batch_tokens=100)
    assert for_throughput(chosen, machine) is chosen


def test_offline_steps_on_a_cpu_are_the_same():
    config = EngineConfig(device="cpu")
    assert for_throughput(config) is config


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, "knee"),
        ({"order": "fair"}, "knee"),
        ({"budget": "fixed"}, "fixed"),
        ({"target_tpot_ms": 40.0}, "latency"),
        ({"order": "slack"}, "slack"),
        ({"order": "slack", "target_tpot_ms": 40.0}, "latency"),
    ],
)
def test_online_prompts_leave_time_to_those_who_decode_unless_told_otherwise(options: Any, budget: str) -> None:
    assert for_latency(EngineConfig(**options)).budget == budget
    assert ReplicaSettings(num_blocks=1, **options).budget_name == budget, "what is simulated is a server"


def test_a_quantized_head_needs_a_format(tmp_path: Path) -> None:
    problem = r"quantize_head.*--quantization fp8"
    with pytest.raises(InvalidParameter, match=problem):
        EngineConfig(quantization="none", quantize_head=True)
    config = EngineConfig(device="cpu", dtype="float32", load_format="dummy", quantize_head=True)
    with pytest.raises(InvalidParameter, match=problem):
        load_model(str(write_tiny_checkpoint(tmp_path)), config)  # auto: not quantized
    assert EngineConfig(quantization="fp8", quantize_head=True).quantize_head


@pytest.mark.parametrize(
    "options", [{}, {"speculate": "ngram"}, {"speculate": "layers:1", "cuda_graphs": False}], ids=str
)
def test_draft_graphs_need_a_network_and_graphs(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="draft_graphs"):
        EngineConfig(draft_graphs=True, **options)


def test_draft_graphs_need_a_gpu(tmp_path: Path) -> None:
    config = EngineConfig(
        device="cpu", dtype="float32", load_format="dummy", speculate="layers:1", draft_graphs=True, kv_memory="1MiB"
    )
    with pytest.raises(InvalidParameter, match=r"draft_graphs.*GPU"):
        load_engine(str(write_tiny_checkpoint(tmp_path)), config, progress=False)
