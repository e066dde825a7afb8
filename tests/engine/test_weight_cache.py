"""Models whose packed weights come from the cache of an earlier start."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine import memory_plan, weights
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.kernels.cpu import bfloat16, int8
from chairlift.layers.formats import blocks
from tests.models.random_gguf import random_gguf

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [[7, 300, 21, 9], list(range(40, 110))]


@pytest.fixture(autouse=True)
def _cached_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MIN_BYTES", 0)


def make(tmp_path: Path, **changes: Any) -> Path:
    return random_gguf(tmp_path, "q4_k_m", **({"num_hidden_layers": 2, "tie_word_embeddings": False} | changes))


def tokens(path: Path, folder: Path, quantization: str) -> list[tuple[int, ...]]:
    llm = LLM(str(path), quantization=quantization, weight_cache=str(folder), max_model_len=256, progress=False)
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was packed")

    monkeypatch.setattr(blocks.BlockWeight, "_add", refuse)
    monkeypatch.setattr(int8.PackedWeight, "fill", refuse)
    monkeypatch.setattr(bfloat16.HalfWeight, "fill", refuse)


@pytest.mark.parametrize("quantization", ["checkpoint", "int8", "int4", "bfloat16"])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_start_packs_nothing(
    quantization: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = make(tmp_path, tie_word_embeddings=tied), tmp_path / "cache"
    first = tokens(path, folder, quantization)
    assert [file.suffix for file in sorted(folder.iterdir())] == [".lock", ".weights"]
    assert tokens(path, Path("off"), quantization) == first
    no_packing(monkeypatch)
    assert tokens(path, folder, quantization) == first
    assert not Path("off").exists()


def test_memory_counts_what_is_mapped(tmp_path: Path) -> None:
    path = make(tmp_path)
    for _ in range(2):
        config = EngineConfig(quantization="checkpoint", weight_cache=str(tmp_path / "cache"))
        model = load_model(str(path), config, progress=False).model
        assert 0.9 * model.num_weight_bytes() < model.num_mapped_bytes() <= model.num_weight_bytes()
    (file,) = (tmp_path / "cache").glob("*.weights")
    assert file.stat().st_size < 1.1 * path.stat().st_size


def test_weights_that_are_not_packed_make_no_file(tmp_path: Path) -> None:
    """Blocks are multiplied by kernels for float32."""
    config = EngineConfig(quantization="checkpoint", dtype="bfloat16", weight_cache=str(tmp_path / "cache"))
    load_model(str(make(tmp_path)), config, progress=False)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "damage", ["flip", "other", "stale", *(pytest.param(each, marks=pytest.mark.slow) for each in ("cut", "empty"))]
)
def test_unusable_files_are_replaced(damage: str, tmp_path: Path) -> None:
    path, folder = make(tmp_path), tmp_path / "cache"
    first = tokens(path, folder, "checkpoint")
    (file,) = folder.glob("*.weights")
    whole = file.read_bytes()
    if damage == "stale":
        os.utime(path, ns=(0, 0))
    else:
        flipped = whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:]
        file.write_bytes({"flip": flipped, "cut": whole[:-4096], "empty": b"", "other": b"x" * 10_000}[damage])
    assert tokens(path, folder, "checkpoint") == first
    assert abs(file.stat().st_size - len(whole)) < 100
    assert (file.read_bytes() == whole) == (damage != "stale")


def test_each_set_of_plugins_that_weights_go_through_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = make(tmp_path), tmp_path / "cache"
    first = tokens(path, folder, "checkpoint")
    plugin = tmp_path / "family.py"
    plugin.write_text("from chairlift.models.families import FAMILIES")
    with monkeypatch.context() as patched:
        patched.setattr(weights, "weight_plugins", lambda: [plugin])
        tokens(path, folder, "checkpoint")
    assert len([*folder.glob("*.weights")]) == 2
    no_packing(monkeypatch)
    assert tokens(path, folder, "checkpoint") == first


def test_the_reason_to_pack_again_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, folder = make(tmp_path), tmp_path / "cache"
    config = EngineConfig(quantization="checkpoint", weight_cache=str(folder))
    load_model(str(path), config, progress=False)
    os.utime(path, ns=(0, 0))
    with caplog.at_level(logging.INFO):
        load_model(str(path), config, progress=False)
    (file,) = folder.glob("*.weights")
    assert caplog.text.count(str(file)) == 2  # why it is not used, and that it was written


def test_weights_of_another_shape_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the identity had not noticed that the checkpoint changed."""
    monkeypatch.setattr(weights, "checkpoint_state", lambda path: {"path": "model.gguf", "files": []})
    folder = tmp_path / "cache"
    tokens(make(tmp_path), folder, "checkpoint")
    path = make(tmp_path, hidden_size=512)
    assert tokens(path, folder, "checkpoint") == tokens(path, Path("off"), "checkpoint")


@pytest.mark.parametrize("obstacle", ["file", "disk"])
def test_a_folder_that_cannot_be_used_costs_only_the_cache(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = make(tmp_path), tmp_path / "cache"
    if obstacle == "file":
        folder.write_text("not a folder")
    else:
        monkeypatch.setattr(weights, "DISK_RESERVE", 1 << 60)
    with caplog.at_level(logging.WARNING):
        assert tokens(path, folder, "checkpoint") == tokens(path, Path("off"), "checkpoint")
    assert "packed weights are not cached" in caplog.text
    assert not list(tmp_path.rglob("*.weights*"))


def test_a_failing_start_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = make(tmp_path), tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(blocks.BlockWeight, "_join", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failure:  # It is kept, as a notebook does, and its frames with it.
            tokens(path, folder, "checkpoint")
    assert not [file for file in folder.iterdir() if file.suffix != ".lock"]
    for lock in folder.iterdir():
        FileLock(lock).acquire(timeout=0).lock.release()  # The next start does not wait.
    assert failure.tb is not None


def test_only_one_of_two_processes_packs(tmp_path: Path) -> None:
    """Threads here; the lock is the same."""
    path, folder, found = make(tmp_path), tmp_path / "cache", []
    threads = [threading.Thread(target=lambda: found.append(tokens(path, folder, "checkpoint"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]


def test_too_little_memory_is_refused_with_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 30 << 20)
    with pytest.raises(UnsupportedModel, match=r"10[0-9.]+ MiB of weights, but 30.0 MiB are free.*--quantization int8"):
        load_model(str(path), EngineConfig(quantization="none", weight_cache="off"), progress=False)
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 1 << 30)
    with pytest.raises(InvalidParameter, match=r"kv_memory: 2.00 GiB is more than the .* free beside .* of weights"):
        load_model(str(path), EngineConfig(quantization="int8", kv_memory="2GiB"), progress=False)


def test_the_stated_memory_is_that_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(tmp_path)
    for quantization in ("checkpoint", "int8", "none"):
        config = EngineConfig(quantization=quantization, weight_cache="off")
        model = load_model(str(path), config, progress=False).model
        checkpoint = load_memory_checkpoint(path)
        stated = memory_plan.expected_weight_bytes(checkpoint, quantization, model.dtype)
        assert stated == pytest.approx(model.num_weight_bytes(), rel=0.03)


def load_memory_checkpoint(path: Path) -> Any:
    from chairlift.loading.checkpoint import open_checkpoint

    return open_checkpoint(path)
