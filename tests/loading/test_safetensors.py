"""Safetensors folders: what transformers saved comes back, and damaged or hostile folders are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from tests.loading.small_files import Damage, damages
from tests.loading.tiny_models import make_model, save_model

INDEX = "model.safetensors.index.json"


def _write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors or {"a": torch.ones(2, 3)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_round_trip(dtype: torch.dtype, shard_size: str, tmp_path: Path) -> None:
    model = make_model("llama").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "40KB")

    checkpoint = open_checkpoint(tmp_path)
    tensors = dict(checkpoint.tensors())
    expected = model.state_dict()
    assert sorted(checkpoint.names()) == sorted(tensors) == sorted(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name]), name
    assert checkpoint.format == "safetensors"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["transformers_version"]
    assert checkpoint.num_bytes == sum(file.stat().st_size for file in files)


def test_a_single_file_may_have_any_name_and_generation_config_may_be_absent(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.names() == ["a"]
    assert checkpoint.generation_config == {}


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    """A tensor that the caller kept stays valid after the file was closed."""
    _write(tmp_path, a=torch.arange(6), b=torch.arange(3))
    tensors = dict(open_checkpoint(tmp_path).tensors())
    assert tensors["a"].tolist() == list(range(6))
    assert tensors["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "shard",
    [
        *["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", 7, None],
        *["model.safetensors\0", "..\\model.safetensors", "config.json", "model.bin"],
    ],
)
def test_an_index_may_only_name_files_beside_it(shard: Any, tmp_path: Path) -> None:
    folder = _write(tmp_path / "model")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")  # what "../" would reach
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CorruptCheckpoint, match=r"not a plain \.safetensors file"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone\.safetensors .* is missing"),
        ({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}, "lacks 1 tensors .* 'b'"),
        ({"weight_map": []}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "JSON object"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: Any, problem: str, tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpoint, match=problem):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("[1]", "must hold a JSON object, not a list"),
        ("{", "not valid JSON"),
        ('{"a": ' + "[" * 100_000, "not valid JSON"),
        ('{"a": "\udcff"}', "not valid JSON"),
    ],
)
def test_a_bad_config_is_refused(config: str, problem: str, tmp_path: Path) -> None:
    (_write(tmp_path) / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptCheckpoint, match=problem) as caught:
        open_checkpoint(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_huge_config_is_not_even_read(tmp_path: Path) -> None:
    with (_write(tmp_path) / "config.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no space
    with pytest.raises(CorruptCheckpoint, match="is larger than"):
        open_checkpoint(tmp_path)


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", locked)  # permissions themselves would not stop a test that runs as root
    with pytest.raises(ModelNotFound, match="cannot be read: Permission denied"):
        open_checkpoint(tmp_path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    (_write(tmp_path) / "config.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"config\.json: cannot be read"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    for name in ("one", "two"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"2 \.safetensors files and no"):
        open_checkpoint(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages())
def test_a_damaged_file_loads_or_is_refused(damage: Damage, tmp_path: Path) -> None:
    _write(tmp_path, a=torch.ones(2, 3), b=torch.ones(4, dtype=torch.bfloat16))
    file = tmp_path / "model.safetensors"
    content = damage(file.read_bytes())
    file.unlink()  # it may still be mapped
    file.write_bytes(content)
    with suppress(CorruptCheckpoint):
        checkpoint = open_checkpoint(tmp_path)
        assert [name for name, _ in checkpoint.tensors()] == checkpoint.names()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedModel, match="convert them to safetensors"):
            open_checkpoint(path)


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=r"no \.safetensors and no \.gguf"):
        open_checkpoint(tmp_path)
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedModel, match=r"2 GGUF files.*one\.gguf, two\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UnsupportedModel, match="neither"):
        open_checkpoint(tmp_path / "notes.txt")


def test_a_safetensors_file_alone_points_to_its_folder(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
