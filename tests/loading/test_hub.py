"""Fetching models from a stub of the hub: what is kept, what is checked, and what errors say."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.file_download import http_get
from safetensors.torch import save

from chairlift.errors import CorruptCheckpoint, ModelNotFound
from chairlift.loading import hub
from chairlift.loading.hub import fetch_from_hub
from chairlift.loading.known_models import cached_folder, known_model
from chairlift.loading.resolve import read_model_config, resolve_model
from tests.loading.stub_hub import stub_hub

WEIGHTS = save({"norm.weight": torch.ones(2)})
INDEX = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
FILES = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": WEIGHTS}
SHARDS = {
    "config.json": b'{"model_type": "qwen3"}',
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": save({"norm.weight": torch.zeros(3)}),
}


def test_a_name_fetches_the_model_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_model("qwen3-0.6b")
    assert known is not None
    with stub_hub("Qwen/Qwen3-0.6B", FILES, tmp_path, monkeypatch) as downloaded:
        assert not known.cached
        folder = resolve_model("qwen3-0.6b", progress=False)
        assert known.cached
        assert resolve_model("Qwen/Qwen3-0.6B", progress=False) == folder == cached_folder("Qwen/Qwen3-0.6B")
    assert sorted(downloaded) == sorted(FILES)


def test_a_known_model_that_is_not_here_is_described_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub("org/other", FILES, tmp_path, monkeypatch) as downloaded:
        for name in ("qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507"):
            assert read_model_config(name).config["num_hidden_layers"] == 36
    assert downloaded == []


def test_shards_that_are_there_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {name: SHARDS[name] for name in SHARDS if name != "model-2.safetensors"}
    with stub_hub("org/name", first, tmp_path, monkeypatch) as downloaded:
        fetch_from_hub("org/name", progress=False)
        assert cached_folder("org/name") is None  # a shard is missing
        assert sorted(downloaded) == sorted(first)
    for file in tmp_path.rglob("trees/*"):  # The hub's commits never change, but that of the stub does.
        file.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    with stub_hub("org/name", SHARDS, tmp_path, monkeypatch) as downloaded:
        folder = fetch_from_hub("org/name", progress=False)
    assert downloaded == ["model-2.safetensors"]
    assert cached_folder("org/name") == folder


def test_a_gated_model_says_where_its_licence_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"'org/name' is gated: accept its licence at https://huggingface.co/org/name, .* HF_TOKEN"
    with (
        stub_hub("org/name", FILES, tmp_path, monkeypatch, gated=True),
        pytest.raises(ModelNotFound, match=says),
    ):
        fetch_from_hub("org/name", progress=False)


def test_a_model_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"there is no model 'org/name' on the Hugging Face hub; if it is a private one, .* HF_TOKEN"
    with stub_hub("org/other", FILES, tmp_path, monkeypatch), pytest.raises(ModelNotFound, match=says):
        fetch_from_hub("org/name", progress=False)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_hub("org/name", FILES, tmp_path, monkeypatch):
        pass
    with pytest.raises(ModelNotFound, match=r"could not be downloaded .*\(.*refused.*\); check the name"):
        fetch_from_hub("org/name", progress=False)


def test_a_disk_without_room_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"model.safetensors": 1 << 60}
    with stub_hub("org/name", FILES, tmp_path, monkeypatch, sizes=sizes) as downloaded:
        with pytest.raises(ModelNotFound, match=r"org/name needs 1073741824.00 GiB more in .* HF_HOME"):
            fetch_from_hub("org/name", progress=False)
        assert downloaded == []


def test_a_file_with_another_checksum_is_refused_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {"model.safetensors": "0" * 64}
    with stub_hub("org/name", FILES, tmp_path, monkeypatch, sums=sums):
        with pytest.raises(CorruptCheckpoint, match=r"model.safetensors came with the SHA-256 .* 0{64} is expected"):
            fetch_from_hub("org/name", progress=False)
        assert cached_folder("org/name") is None
    assert not list(tmp_path.rglob("model.safetensors"))


def test_an_interrupted_file_is_continued_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RESUMED_BYTES", 1000)
    large = {**FILES, "model.safetensors": save({"norm.weight": torch.arange(5000.0)})}

    def interrupted(url: str, target: Any, **settings: Any) -> None:
        if not url.endswith(".safetensors"):
            http_get(url, target, **settings)
            return
        target.write(large["model.safetensors"][:4000])
        raise KeyboardInterrupt

    with stub_hub("org/name", large, tmp_path, monkeypatch), monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.http_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_from_hub("org/name", progress=False)
    (partial,) = tmp_path.rglob("*.partial")
    assert partial.stat().st_size == 4000
    assert cached_folder("org/name") is None
    with stub_hub("org/name", large, tmp_path, monkeypatch) as downloaded:
        folder = fetch_from_hub("org/name", progress=False)
    assert downloaded.ranges == [("model.safetensors", 4000)]
    assert (folder / "model.safetensors").read_bytes() == large["model.safetensors"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_continued_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RESUMED_BYTES", 10)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    damaged = blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.partial"
    damaged.write_bytes(b"?" * 20)
    with stub_hub("org/name", FILES, tmp_path, monkeypatch):
        with pytest.raises(CorruptCheckpoint, match="is deleted, so try again"):
            fetch_from_hub("org/name", progress=False)
        assert not damaged.exists()
        assert (fetch_from_hub("org/name", progress=False) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_broken_connection_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "RESUMED_BYTES", 1000)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    large = {**FILES, "model.safetensors": save({"norm.weight": torch.arange(2000.0)})}
    with stub_hub("org/name", large, tmp_path, monkeypatch, broken_after=5000) as downloaded:
        folder = fetch_from_hub("org/name", progress=False)
    assert downloaded.ranges == [("model.safetensors", 5000)]
    assert (folder / "model.safetensors").read_bytes() == large["model.safetensors"]
