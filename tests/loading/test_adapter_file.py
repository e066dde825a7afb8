"""Reading adapters: what PEFT and llama.cpp write, and files that are damaged, hostile or of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.errors import ChairliftError, CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.adapter_file import MAX_RANK, open_adapter
from tests.adapters import write_adapter

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.11.self_attn.v_proj"


def pair(module: str = Q, rank: int = 4, inputs: int = 6, outputs: int = 8) -> dict[str, torch.Tensor]:
    a, b = torch.arange(rank * inputs).float(), torch.arange(rank * outputs).float()
    return {f"{module}.lora_A": a.view(rank, inputs), f"{module}.lora_B": b.view(outputs, rank)}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 1}, 0.25),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"v_proj": 2}}, 2.0),
        ({"r": 16, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({"target_modules": r".*\.q_proj"}, 2.0),
    ],
)
def test_the_scale_of_a_product(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    file = open_adapter(write_adapter(tmp_path, pair(), **config))
    assert {name: shape.scale for name, shape in file.shapes.items()} == {Q: scale}
    ((name, product),) = file.products()
    assert (name, product.scale) == (Q, scale)
    assert torch.equal(product.b, pair()[f"{Q}.lora_B"])


def test_the_version_is_that_of_the_content(tmp_path: Path) -> None:
    first, second = write_adapter(tmp_path / "a", pair()), write_adapter(tmp_path / "b", pair())
    assert open_adapter(first).version == open_adapter(second).version
    write_adapter(second, pair(), lora_alpha=9)
    assert open_adapter(first).version != open_adapter(second).version


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "use_dora.*DoRA divides each row"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \(lm_head\)"),
        ({"bias": "all"}, "bias"),
        ({"trainable_token_indices": [1]}, "embedding table"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": "4"}, "r must be a number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
        ({"r": 8}, "has the rank 4, but adapter_config.json declares 8"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"alpha_pattern": ["q_proj"]}, "must be an object"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "too complex"),
        ({"alpha_pattern": {"(": 1}}, "is no pattern"),
        ({"alpha_pattern": {"a" * 1000: 1}}, "too complex"),
        ({"alpha_pattern": {"q_proj": "much"}}, "must be a number"),
    ],
)
def test_configs_that_are_refused_by_name(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    folder = write_adapter(tmp_path, pair(), **config)
    with pytest.raises((CorruptCheckpoint, UnsupportedModel), match=problem):
        open_adapter(folder)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({}, "holds no matrix"),
        ({f"{Q}.lora_A": torch.zeros(4, 6)}, "only one of its two matrices"),
        ({f"{Q}.lora_A": torch.zeros(4, 6), f"{Q}.lora_B": torch.zeros(8, 5)}, r"are \[4, 6\] and \[8, 5\]"),
        ({f"{Q}.lora_A": torch.zeros(4), f"{Q}.lora_B": torch.zeros(8, 4)}, "are"),
        ({f"{Q}.lora_A": torch.zeros(4, 0), f"{Q}.lora_B": torch.zeros(8, 4)}, "are"),
        (pair(rank=MAX_RANK + 1), "at most 512"),
        ({**pair(), "model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}, "embedding table"),
        ({**pair(), f"{Q}.lora_magnitude_vector": torch.zeros(8)}, "use_dora"),
        ({**pair(), "lm_head": torch.zeros(8, 4)}, "neither lora_A"),
        ({f"{Q}.lora_A": torch.zeros(4, 6).int(), f"{Q}.lora_B": torch.zeros(8, 4)}, "not floats"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    folder = write_adapter(tmp_path, tensors, r=MAX_RANK + 1 if "512" in problem else 4)
    with pytest.raises((CorruptCheckpoint, UnsupportedModel), match=problem):
        open_adapter(folder)


def test_damaged_files_are_errors_that_name_them(tmp_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole", pair())
    data = (whole / "adapter_model.safetensors").read_bytes()
    for number, cut in enumerate((0, 7, 30, len(data) - 1)):
        folder = write_adapter(tmp_path / f"{number}", pair())
        (folder / "adapter_model.safetensors").write_bytes(data[:cut])
        with pytest.raises(CorruptCheckpoint, match=r"adapter_model\.safetensors"):
            open_adapter(folder)
    (whole / "adapter_config.json").write_text("[]")
    with pytest.raises(CorruptCheckpoint, match="JSON object"):
        open_adapter(whole)


def test_what_is_not_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "pickled" / "adapter_model.bin").write_bytes(b"")
    for path, error, problem in (
        (tmp_path / "none", ModelNotFound, "no adapter"),
        (tmp_path, ModelNotFound, "there is no adapter_config.json"),
        (tmp_path / "pickled", ModelNotFound, "is a pickle"),
        (tmp_path / "model.gguf", CorruptCheckpoint, "damaged"),
        (Path("x" * 5000), ModelNotFound, "opened|no adapter"),
    ):
        with pytest.raises(error, match=problem):
            open_adapter(path)


def write_gguf(path: Path, architecture: str = "llama", kind: str = "lora", names: tuple[str, ...] = ()) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", 8.0)
    generator = np.random.default_rng(0)
    for name in names or ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        writer.add_tensor(f"{name}.lora_a", generator.standard_normal((4, 6), dtype=np.float32))
        writer.add_tensor(f"{name}.lora_b", generator.standard_normal((8, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_has_the_rows_of_hugging_face(tmp_path: Path) -> None:
    file = open_adapter(write_gguf(tmp_path / "adapter.gguf"))
    assert {name: shape.scale for name, shape in file.shapes.items()} == {
        "layers.0.self_attn.q_proj": 2.0,
        "layers.1.mlp.down_proj": 2.0,
    }
    products = dict(file.products({"layers.0.self_attn.q_proj": 2}))
    stored = file._file.read(file._tensors["layers.0.self_attn.q_proj"]["b"])  # type: ignore[attr-defined]
    # The converter wrote the rows 0, 2, 1, 3 of each of two heads of 4 rows.
    assert np.array_equal(products["layers.0.self_attn.q_proj"].b.numpy(), stored[[0, 2, 1, 3, 4, 6, 5, 7]])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "control_vector"}, "not a LoRA"),
        ({"architecture": "unknown"}, "architecture 'unknown'"),
        ({"names": ("token_embd.weight",)}, "token_embd.weight.lora_a"),
        ({"names": ("blk.0.ffn_gate_exps.weight",)}, "ffn_gate_exps"),
    ],
)
def test_gguf_adapters_that_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    path = write_gguf(tmp_path / "adapter.gguf", **options)
    with pytest.raises(ChairliftError, match=problem):
        open_adapter(path)
