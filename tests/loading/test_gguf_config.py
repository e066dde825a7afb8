"""The config for GGUF metadata that is unusual, wrong or incomplete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from tests.loading.gguf_writing import interleaved, llama3_divisors
from tests.loading.small_files import write_small_gguf

Edit = Callable[[GGUFWriter], Any]


def _set(key: str, value: Any) -> Edit:
    def edit(writer: GGUFWriter) -> None:
        entry = writer.kv_data[0].get(key)
        if entry is None:
            writer.add_uint32(key, value)
        else:
            entry.value = value

    return edit


def test_config_of_the_small_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_small_gguf(tmp_path / "small.gguf"))
    assert checkpoint.format == "gguf"
    assert checkpoint.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    # <|im_end|> is not the eos of the file, but ends a turn
    assert checkpoint.generation_config == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    assert checkpoint.num_bytes == 10 * 34 + 32 * 18 + 16 * 20 + 16 * 64 + 32 * 64 + 32 * 22 + 32 * 4


def test_interleaving_moves_rows_within_heads() -> None:
    """The helper of these tests, on a hand-made example of two heads of four rows."""
    rows = np.arange(8).reshape(8, 1)
    assert interleaved(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_llama3_get_their_name_back(factor: float, tmp_path: Path) -> None:
    scaling = _LLAMA31 | {"factor": factor, "original_max_position_embeddings": 8192}
    divisors = llama3_divisors({"rope_theta": 500000.0, "rope_type": "llama3"} | scaling, 16)
    assert len(set(divisors.tolist())) > 2

    def edit(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(500000.0)
        writer.add_tensor("rope_freqs.weight", divisors)

    config = open_checkpoint(write_small_gguf(tmp_path / "small.gguf", edit)).config
    assert config["rope_scaling"] == {"rope_type": "llama3"} | scaling


def test_divisors_of_unknown_origin_are_kept(tmp_path: Path) -> None:
    divisors = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0]
    edit: Edit = lambda writer: writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))  # noqa: E731
    config = open_checkpoint(write_small_gguf(tmp_path / "small.gguf", edit)).config
    assert config["rope_scaling"] == {"rope_type": "frequency_factors", "factors": divisors}


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    edit: Edit = lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))  # noqa: E731
    checkpoint = open_checkpoint(write_small_gguf(tmp_path / "small.gguf", edit))
    assert checkpoint.config["rope_scaling"] is None
    assert not any("rope" in name for name in checkpoint.names())


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_set("general.architecture", "mamba"), "'mamba' is not supported; supported are "),
        (_set("split.count", 2), "merge the parts"),
        (lambda writer: writer.add_tensor("blk.0.ssm_a", np.ones(4, np.float32)), "'blk.0.ssm_a' is not known"),
        (lambda writer: writer.add_tensor("cls.weight", np.ones(4, np.float32)), "'cls.weight' is not known"),
        (_set("llama.rope.dimension_count", 8), "part of each head"),
        (_set("llama.attention.value_length", 8), "keys and values"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "ntk"), "'ntk'"),
    ],
)
def test_unsupported_features_are_named(edit: Edit, problem: str, tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", edit)
    with pytest.raises(UnsupportedModel, match=problem):
        open_checkpoint(path)


def _per_layer_heads(writer: GGUFWriter) -> None:
    writer.kv_data[0]["llama.attention.head_count_kv"].value = [1, 2]


def test_layers_that_differ_are_not_supported(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", _per_layer_heads)
    with pytest.raises(UnsupportedModel, match="differs between layers"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_set("llama.block_count", 2), "claims 2 layers"),
        (_set("llama.block_count", 2**31 - 1), "claims 2147483647 layers"),
        (_set("llama.block_count", 0), "block_count is 0"),
        (_set("llama.attention.head_count", 3), "attn_q.weight"),
        (_set("llama.attention.layer_norm_rms_epsilon", float("nan")), "positive number"),
        (_set("tokenizer.ggml.eos_token_id", 10), "beyond the 10 tokens"),
        (lambda writer: writer.kv_data[0].pop("llama.context_length"), "context_length is missing"),
        (lambda writer: writer.tensors[0].pop("token_embd.weight"), "token_embd.weight"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), "rope_freqs.weight"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32)), "positive"),
    ],
)
def test_contradictions_are_refused(edit: Edit, problem: str, tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", edit)
    with pytest.raises(CorruptCheckpoint, match=problem):
        open_checkpoint(path)
