"""What is chosen where a config leaves it open: the values over configs, made checkpoints and described machines."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.engine.settings import LoadSettings, Machine, for_throughput, resolve, resolve_engine, resolve_machine
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter
from chairlift.models import choose_implementation
from tests.tiny import write_tiny_checkpoint

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
GPT2_SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


@dataclass(frozen=True)
class MadeMachine(Machine):
    has_fast_int8: bool = True
    needs_bfloat16_kernels: bool = False


MACHINES = {
    "laptop": MadeMachine(0, 4, needs_bfloat16_kernels=True),
    "old": MadeMachine(0, 1, has_fast_int8=False),
    "server": MadeMachine(0, 64),
    "gpu": MadeMachine(1, 16),
}


def llama(hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": 32_000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    return {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, **sizes, **heads, **more}


EXPERTS = llama(512, 4, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
CHECKPOINTS = {
    "tiny": (llama(64, 2), "safetensors", None),
    "small": (llama(576, 30), "safetensors", None),
    "large": (llama(2048, 16), "safetensors", None),
    "small gguf": (llama(576, 30), "gguf", "GGUF, Q4_K"),
    "large gguf": (llama(2048, 16), "gguf", "GGUF, Q4_K"),
    "plain gguf": (llama(2048, 16), "gguf", None),
    "gptq": (llama(2048, 16), "safetensors", "GPTQ"),
    "experts": (EXPERTS, "safetensors", None),
    "other code": ({"model_type": "gpt2", **GPT2_SIZES}, "safetensors", None),
}


def made(name: str) -> Any:
    config, format, quantization = CHECKPOINTS[name]
    return SimpleNamespace(path=Path("made"), config=dict(config), format=format, quantization=quantization)


@pytest.mark.parametrize(
    ("machine", "options", "device", "dtype", "threads", "limits", "doubled"),
    [
        ("laptop", {}, "cpu", FLOAT32, 4, (512, 512, 64), False),
        ("old", {}, "cpu", FLOAT32, 1, (256, 256, 64), False),
        ("server", {}, "cpu", FLOAT32, 64, (2048, 2048, 64), False),
        ("gpu", {}, "cuda", BFLOAT16, 16, (8192, 8192, 1024), True),
        ("gpu", {"device": "cpu"}, "cpu", FLOAT32, 16, (2048, 2048, 64), False),
        ("gpu", {"device": "cuda:0", "dtype": "float16"}, "cuda:0", FLOAT16, 16, (8192, 8192, 1024), True),
        ("laptop", {"dtype": "bfloat16", "threads": 3}, "cpu", BFLOAT16, 3, (384, 384, 64), False),
        ("laptop", {"max_batch_tokens": 20}, "cpu", FLOAT32, 4, (20, 20, 20), False),
        ("laptop", {"max_prefill_tokens": 50}, "cpu", FLOAT32, 4, (512, 50, 64), False),
        ("laptop", {"max_prefill_tokens": 900, "max_batch_requests": 7}, "cpu", FLOAT32, 4, (512, 512, 7), False),
    ],
)
def test_what_follows_from_the_machine(
    machine: str,
    options: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    threads: int,
    limits: tuple[int, int, int],
    doubled: bool,
) -> None:
    config = EngineConfig(**options)
    chosen = resolve_machine(config, MACHINES[machine])
    assert (chosen.device, chosen.dtype, chosen.threads) == (torch.device(device), dtype, threads)
    assert (chosen.max_batch_tokens, chosen.max_prefill_tokens, chosen.max_batch_requests) == limits
    offline = for_throughput(config, MACHINES[machine])
    assert offline.max_batch_tokens == (2 * limits[0] if doubled else config.max_batch_tokens)


ON_CPU = {
    "tiny": "none",
    "small": "int8",
    "large": "int8",
    "small gguf": "int8",
    "large gguf": "checkpoint",
    "plain gguf": "int8",
    "gptq": "int8",
    "experts": "none",  # int8 stores no experts
    "other code": "int8",
}
ALL = dict.fromkeys(CHECKPOINTS)


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        ("laptop", {}, ON_CPU),
        ("laptop", {"quantization": None}, ON_CPU),
        ("old", {}, dict.fromkeys(ALL, "none")),
        ("laptop", {"dtype": "float32"}, dict.fromkeys(ALL, "none")),
        ("server", {"dtype": "bfloat16"}, dict.fromkeys(ALL, "none")),
        ("laptop", {"quantization": "fp8"}, dict.fromkeys(ALL, "fp8")),
    ],
)
def test_the_format_of_the_weights(machine: str, options: dict[str, Any], expected: dict[str, str]) -> None:
    config = EngineConfig(device="cpu", **options)
    assert {
        name: resolve(resolve_machine(config, MACHINES[machine]), made(name)).quantization for name in CHECKPOINTS
    } == expected


def test_the_format_of_the_weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    found = {
        name: resolve(resolve_machine(EngineConfig(), MACHINES["gpu"]), made(name)).quantization for name in CHECKPOINTS
    }
    kept = {"small gguf", "large gguf", "gptq"}
    assert found == {name: "checkpoint" if name in kept else "none" for name in CHECKPOINTS}


def test_bfloat16_is_the_format_of_products_where_our_kernels_are_faster() -> None:
    config = EngineConfig(device="cpu", dtype="bfloat16")
    chosen = resolve(resolve_machine(config, MACHINES["laptop"]), made("small"))
    assert (chosen.quantization, chosen.dtype, chosen.model_dtype) == ("bfloat16", BFLOAT16, FLOAT32)
    foreign = made("small")
    choose_implementation(foreign.config, "transformers")
    chosen = resolve(resolve_machine(config, MACHINES["laptop"]), foreign)
    assert (chosen.quantization, chosen.model_dtype) == ("none", BFLOAT16)


@pytest.mark.parametrize(
    ("machine", "options", "problem"),
    [
        ("laptop", {"device": "cuda"}, "device.*no CUDA device"),
        ("gpu", {"device": "cuda:1"}, "device.*there are 1"),
        ("old", {"device": "cpu", "max_batch_requests": 300}, "max_batch_requests.*max_batch_tokens is 256"),
        ("laptop", {"max_model_len": 5000}, "max_model_len.*4096"),
        ("old", {"device": "cpu", "quantize_head": True}, "quantize_head.*--quantization fp8"),
    ],
)
def test_what_is_refused(machine: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        resolve(resolve_machine(EngineConfig(**options), MACHINES[machine]), made("large"))


def test_every_chosen_value_has_a_reason() -> None:
    chosen = resolve(resolve_machine(EngineConfig(threads=2, max_model_len=100), MACHINES["laptop"]), made("large"))
    assert isinstance(chosen, LoadSettings)
    assert chosen.reasons.keys() >= {"device", "dtype", "threads", "quantization", "max_model_len", "max_batch_tokens"}
    assert "threads 2: as configured" in chosen.lines()
    assert "quantization int8: 8-bit weights are faster on this CPU" in chosen.lines()
    assert "device cpu: this machine has no GPU" in chosen.lines()
    with pytest.raises(FrozenInstanceError):
        chosen.threads = 3  # type: ignore[misc]


def test_an_engine_gets_its_cache_and_attention_from_its_model(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=64, kv_dtype="bfloat16")
    model = load_model(str(write_tiny_checkpoint(tmp_path)), config, progress=False).model
    chosen = resolve_engine(resolve_machine(config), model)
    assert (chosen.kv_dtype, chosen.max_model_len) == (BFLOAT16, 64)
    assert f"attention {chosen.attention.name}: the fastest that can run this model here" in chosen.lines()
    assert resolve_engine(resolve_machine(EngineConfig(device="cpu")), model).kv_dtype is FLOAT32
