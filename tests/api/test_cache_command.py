"""`chairlift cache`: what a folder of cached blocks contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.core.kv.tiers import PartKey
from chairlift.runner.tiers.stores import DiskStore
from tests.api.cli_runner import run

SIZES = {"kv": 1000, "state": 50}


def key(number: int, part: str = "kv") -> PartKey:
    return PartKey(number.to_bytes(32, "big"), part)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks and a state of one model, and a block of another."""
    for weights, parts in (("a", [key(1), key(2), key(3), key(3, "state")]), ("b", [key(1)])):
        store = DiskStore(tmp_path, 10**6, {"weights": weights, "block_size": 16, "kv_dtype": "torch.float32"}, SIZES)
        for part in parts:
            store.put(part, bytes(SIZES[part.part]))
        store.close()
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def test_ls_lists_models(folder: Path) -> None:
    listed = json.loads(run("cache", "ls", str(folder), "--json").stdout)["models"]
    assert sorted((model["blocks"], model["tokens"], model["kv_dtype"]) for model in listed) == [
        (1, 16, "float32"),
        (3, 48, "float32"),
    ]
    assert "48" in run("cache", "ls", str(folder)).stdout


def test_stats_count_parts(folder: Path) -> None:
    counts = json.loads(run("cache", "stats", str(folder), "--json").stdout)
    assert (counts["models"], counts["parts"]) == (2, {"kv": 4, "state": 1})
    assert counts["used_within"]["an hour"] == 5
    assert "2 models: 4 blocks, 1 states" in run("cache", "stats", str(folder)).stdout


def test_verify_finds_what_is_damaged(folder: Path) -> None:
    assert run("cache", "verify", str(folder)).exit_code == 0
    path = next(folder.rglob(f"{key(2).digest.hex()}.kv"))
    path.write_bytes(path.read_bytes()[:-1])
    result = run("cache", "verify", str(folder))
    assert result.exit_code == 1
    assert f"damaged: {path}" in result.stdout
    assert "4 of 5 files are intact" in result.stdout


def test_clear_removes_one_model_or_all(folder: Path) -> None:
    listed = json.loads(run("cache", "ls", str(folder), "--json").stdout)["models"]
    larger = max(listed, key=lambda model: model["blocks"])
    assert "4 files removed" in run("cache", "clear", str(folder), "--model", larger["fingerprint"][:10]).stdout
    assert "1 files removed" in run("cache", "clear", str(folder)).stdout
    assert (folder / "notes.txt").read_text() == "mine"
    assert not list(folder.rglob("*.kv"))


def test_other_folders_and_folders_in_use_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    result = run("cache", "ls", str(other))
    assert result.exit_code
    assert "is no folder of a KV cache" in result.output
    store = DiskStore(folder, 10**6, {"weights": "a"}, SIZES)
    result = run("cache", "clear", str(folder))
    assert "in use by another process" in result.output
    store.close()
