"""`chairlift models --check`: what runs, how, and the memory that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from chairlift.engine.model_check import check_model
from chairlift.errors import UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.tokenizer import make_tokenizer
from tests.api.cli_runner import run
from tests.loading.gguf_writing import write_gguf
from tests.loading.small_files import write_small_gguf
from tests.loading.stub_hub import stub_hub
from tests.models.checkpoints import CPU, load, make_reference, save
from tests.models.tiny_configs import tiny_config

pytest.importorskip("transformers")

# Multiples of the tiles of 8-bit weights, whose padding the estimate leaves out.
SIZES = {"hidden_size": 192, "intermediate_size": 384, "vocab_size": 576, "head_dim": 48}


def _sizes(model_type: str) -> dict[str, int]:
    return {name: size for name, size in SIZES.items() if name != "head_dim" or model_type == "llama"}


def write(folder: Path, model_type: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(model_type, **changes).to_dict()))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "bloom", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_what_the_loaded_model_takes(model_type: str, tied: bool, tmp_path: Path) -> None:
    save(make_reference(tiny_config(model_type, **_sizes(model_type), tie_word_embeddings=tied)), tmp_path)
    found = check_model(str(tmp_path))
    plain, rounded = load(tmp_path, device=CPU), load(tmp_path, device=CPU, quantization="int8")
    assert found.weight_bytes["float32"] == plain.num_weight_bytes()
    assert found.formats["int8"].weight_bytes == pytest.approx(rounded.num_weight_bytes(), rel=0.005)
    layers = plain.attention_layers
    assert found.kv_bytes_per_token["float32"] == 4 * sum(2 * each.num_kv_heads * each.head_dim for each in layers)
    assert found.max_model_len == plain.max_len
    assert found.stored_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_a_config_cannot_control_the_terminal(tmp_path: Path) -> None:
    config = tiny_config("llama").to_dict() | {"model_type": "x\x1b]0;title\x07"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("models", "--check", str(tmp_path))
    assert f"model  {tmp_path} (x]0;title)" in result.stdout
    assert not {"\x1b", "\x07"} & {*result.output}


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_for_cpus_and_hold_the_table(tied: bool, tmp_path: Path) -> None:
    sizes = SIZES | {"head_dim": 64, "tie_word_embeddings": tied}
    save(make_reference(tiny_config("llama", **sizes)), tmp_path)
    found = check_model(str(tmp_path)).formats["blocks"]
    assert found.device == "CPU"
    assert found.weight_bytes == pytest.approx(load(tmp_path, quantization="blocks").num_weight_bytes(), rel=0.02)


def test_experts_of_4_bits_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    write(tmp_path, "gpt_oss", **sizes)
    assert "checkpoint" not in check_model(str(tmp_path)).formats
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = check_model(str(tmp_path))
    # Of 8 experts both products, whose rows of 64 and 96 columns become one chunk of 128 in 4 bits with 4 scales.
    saved = 8 * (2 * 96 * (2 * 64 - 64 - 4) + 64 * (2 * 96 - 64 - 4))
    assert found.formats["checkpoint"].weight_bytes == found.weight_bytes["bfloat16"] - saved


def test_a_config_without_a_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    found = check_model(str(tmp_path))
    assert (found.path, found.model_type, found.reason) == ("refused", "unknown", "config.json names no model_type")


def test_4_bit_weights_are_estimated(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    save(make_reference(tiny_config("llama", **sizes)), tmp_path)
    found = check_model(str(tmp_path)).formats["int4"]
    model = load(tmp_path, quantization="int4", dtype=torch.bfloat16)
    assert found.weight_bytes == pytest.approx(model.num_weight_bytes(), rel=0.02)


def test_the_paths_are_native_fallback_and_refused(tmp_path: Path) -> None:
    native = run("models", "--check", str(write(tmp_path / "a", "llama")), COLUMNS="80")
    assert native.exit_code == 0
    assert "natively" in native.stdout
    fallback = run("models", "--check", str(write(tmp_path / "b", "gpt_neox") / "config.json"), COLUMNS="80")
    assert fallback.exit_code == 0
    assert "that of transformers" in fallback.stdout
    refused = run("models", "--check", str(write(tmp_path / "c", "mamba")), COLUMNS="80")
    assert refused.exit_code == 1
    assert "recurrent state" in " ".join(refused.stdout.split())
    for result in (native, fallback, refused):
        assert max(map(len, result.stdout.splitlines())) <= 80


def test_json(tmp_path: Path) -> None:
    experts = json.loads(run("models", "--check", str(write(tmp_path / "a", "mixtral")), "--json").stdout)
    assert (experts["model_type"], experts["path"], experts["reason"]) == ("mixtral", "native", None)
    assert experts["formats"]["bfloat16"] == {
        "device": "CPU",
        "weight_bytes": None,
        "cpu_weight_bytes": None,
        "obstacles": ["this model has experts"],
    }
    assert experts["formats"]["int4"]["obstacles"] == ["this model has experts"]  # on a GPU
    sizes = (experts["formats"][name]["weight_bytes"] for name in ("blocks", "int8"))
    whole = experts["weight_bytes"]["float32"]
    assert all(0.2 * whole < size < 0.5 * whole for size in sizes)
    refused = run("models", "--check", str(write(tmp_path / "b", "mamba")), "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["path"] == "refused"
    for text in ("{", "null", '{"model_type": "llama", "hidden_size": -1}'):
        (tmp_path / "b" / "config.json").write_text(text)
        corrupt = run("models", "--check", str(tmp_path / "b"), "--json")
        assert (corrupt.exit_code, corrupt.stderr) == (1, "")
        assert json.loads(corrupt.stdout)["path"] == "refused"


def test_gguf_file(tmp_path: Path) -> None:
    save(make_reference(tiny_config("llama")), tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    (tmp_path / "config.json").unlink()
    found = check_model(str(tmp_path / "model.gguf"))
    assert (found.model_type, found.path) == ("llama", "refused")
    assert found.reason is not None
    assert "no vocabulary" in found.reason
    assert check_model(str(tmp_path)).num_parameters == found.num_parameters


@pytest.mark.parametrize(
    ("pre", "words"),
    [("glm4", "pre-tokenizer glm4"), (None, "pre-tokenizer default, since the file names none")],
)
def test_gguf_tokenizer_is_named(pre: str | None, words: str, tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", lambda writer: _set_pre(writer, pre))
    found = check_model(str(path))
    assert (found.path, found.tokenizer) == ("native", f"byte-level BPE, 10 tokens, {words}")
    assert words in run("models", "--check", str(path)).stdout


def test_gguf_tokenizer_is_refused_as_at_a_start(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "small.gguf", lambda writer: _set_pre(writer, "klingon"))
    with pytest.raises(
        UnsupportedModel, match="the pre-tokenizer 'klingon' is not supported; supported are"
    ) as refusal:
        make_tokenizer(open_checkpoint(path))
    found = check_model(str(path))
    assert (found.path, found.reason, found.tokenizer) == ("refused", str(refusal.value), None)
    assert run("models", "--check", str(path)).exit_code == 1


def _set_pre(writer: GGUFWriter, pre: str | None) -> None:
    writer.kv_data[0].pop("tokenizer.ggml.pre")
    if pre is not None:
        writer.add_tokenizer_pre(pre)


def test_quantized_checkpoint(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    folder = write(tmp_path, "llama", quantization_config=settings)
    assert "AWQ" in str(check_model(str(folder)).stored)
    folder = write(tmp_path, "llama", quantization_config={"quant_method": "unheard_of"})
    found = check_model(str(folder))
    assert (found.path, "unheard_of" in str(found.reason)) == ("refused", True)


def test_hub_id_fetches_only_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps(tiny_config("qwen3").to_dict()).encode()
    files = {"config.json": config, "model.safetensors": b"", "tokenizer.json": b"{}"}
    with stub_hub("someone/some-model", files, tmp_path, monkeypatch) as downloaded:
        assert check_model("someone/some-model").model_type == "qwen3"
    assert downloaded == ["config.json"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("no_such_model", "no model 'no_such_model': give"), ("qwen3:0.6b", "did you mean qwen3-0.6b? Else give")],
)
def test_models_that_do_not_exist(name: str, problem: str) -> None:
    result = run("models", "--check", name)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_a_known_model_needs_not_be_here(tmp_path: Path) -> None:
    result = run("models", "--check", "smollm2-135m", CHAIRLIFT_CACHE=str(tmp_path))
    assert "134,515,008 weights, up to 8,192 tokens" in result.stdout


def test_folder_without_a_model(tmp_path: Path) -> None:
    result = run("models", "--check", str(tmp_path))
    assert result.exit_code == 2
    assert "has no config.json" in result.stderr
