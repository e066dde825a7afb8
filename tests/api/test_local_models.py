"""`chairlift pull`, `list`, `show` and `rm`, with a stub of the hub and caches of their own."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli import local_models as commands
from chairlift.loading.known_models import cached_folder
from chairlift.loading.local_models import local_models
from chairlift.server.process.running import RunningServer, ServerStatus
from tests.api.cli_runner import run
from tests.loading.stub_hub import stub_hub
from tests.tiny import CHATML, write_tiny_checkpoint

QWEN = "Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # No other servers are found.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", chat_template=CHATML)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def pulled(files: dict[str, bytes], caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with stub_hub(QWEN, files, caches / "hub", monkeypatch):
        result = run("pull", "qwen3-0.6b", "--quiet")
        assert result.exit_code == 0, result.output
    return Path(result.stdout.strip())


def test_pull_fetches_a_model_and_says_what_to_do_with_it(
    files: dict[str, bytes], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub(QWEN, files, caches / "hub", monkeypatch) as downloaded:
        result = run("pull", "qwen3-0.6b")
        assert result.exit_code == 0, result.output
        assert "about 1.5 GB from https://huggingface.co/Qwen/Qwen3-0.6B; licence Apache-2.0" in result.stderr
        assert "chairlift run qwen3-0.6b" in result.stderr
        assert Path(result.stdout.strip()) == cached_folder(QWEN)
        count = len(downloaded)
        assert run("pull", QWEN).exit_code == 0
        assert len(downloaded) == count


def test_pull_refuses_what_is_here_and_what_does_not_exist(caches: Path) -> None:
    assert "is a file or folder on this machine already" in run("pull", str(caches)).stderr
    assert "no model 'qwen': did you mean" in run("pull", "qwen").stderr


def test_pull_that_is_interrupted_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, *, progress: bool) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("chairlift.loading.resolve.resolve_model", interrupted)
    result = run("pull", "qwen3-0.6b")
    assert result.exit_code == 130
    assert "The same command continues" in result.stderr


def test_list_shows_models_and_what_they_take(pulled: Path, caches: Path) -> None:
    packed = caches / "own" / "weights" / f"{pulled.name}-0123456789ab.weights"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(bytes(3_000_000))
    result = run("list")
    row = next(line.split() for line in result.stdout.splitlines() if "qwen3-0.6b" in line)
    assert row[-1] == "yes"
    assert row[3:5] == ["3", "MB"]
    assert "today" in row
    (entry,) = json.loads(run("list", "--json").stdout)["models"]
    assert (entry["name"], entry["hub_id"], entry["state"]) == ("qwen3-0.6b", QWEN, "complete")
    assert entry["packed_size"] == 3_000_000


def test_list_tells_models_that_cannot_run(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No model is on this machine yet. `chairlift pull smollm2-135m`" in run("list").stderr
    with stub_hub("org/checked", {"config.json": b'{"model_type": "qwen3"}'}, caches / "hub", monkeypatch):
        run("models", "--check", "org/checked")
    assert [(model.name, model.state) for model in local_models()] == [("org/checked", "no safetensors")]
    (caches / "hub" / "models--org--checked" / "blobs" / "0.partial").write_bytes(bytes(1000))
    (model,) = local_models()
    assert (model.state, model.size > 1000) == ("incomplete", True)
    assert run("rm", "org/checked", "--yes").exit_code == 0
    assert not model.path.exists()


def test_show_describes_a_model_from_its_files(pulled: Path) -> None:
    shown = run("show", "qwen3-0.6b").stdout
    for text in (
        f"{pulled}",
        "Apache-2.0",
        "temperature 0.6, top_k 20",
        "tool calls as hermes",
        "fits here  yes, with",
    ):
        assert text in shown
    about = json.loads(run("show", "qwen3-0.6b", "--json").stdout)
    assert about["recommended_sampling"] == {"temperature": 0.6, "top_k": 20}
    assert about["fit"]["command"].startswith("chairlift serve qwen3-0.6b")
    assert run("show", QWEN, "--template").stdout.strip() == CHATML.strip()


def test_show_describes_a_known_model_that_is_not_here() -> None:
    shown = run("show", "llama3.1-8b").stdout
    for text in ("8.0B, llama", "131,072 tokens", "to be accepted at https://huggingface.co/meta-llama", "not on this"):
        assert text in shown
    assert "is not on this machine" in run("show", "llama3.1-8b", "--template").stderr


def test_rm_deletes_a_model_and_its_packed_weights_only(pulled: Path, caches: Path) -> None:
    weights = caches / "own" / "weights"
    weights.mkdir(parents=True)
    packed = [weights / f"{pulled.name}-0123456789ab.{suffix}" for suffix in ("weights", "lock")]
    others = [weights / "other-0123456789ab.weights", caches / "hub" / "models--org--other" / "refs" / "main"]
    others[1].parent.mkdir(parents=True)
    for file in (*packed, *others):
        file.write_text("x")
    asked = run("rm", "qwen3-0.6b")
    assert (asked.exit_code, pulled.exists()) == (2, True)
    assert "--yes: is needed to delete qwen3-0.6b" in asked.stderr
    result = run("rm", "qwen3-0.6b", "--yes")
    assert result.exit_code == 0, result.output
    assert "qwen3-0.6b is deleted" in result.stderr
    assert not pulled.exists()
    assert [file.exists() for file in (*packed, *others)] == [False, False, True, True]
    assert run("rm", "qwen3-0.6b", "--yes").exit_code == 2


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_rm_asks_on_a_terminal(pulled: Path, monkeypatch: pytest.MonkeyPatch, answer: str, deleted: bool) -> None:
    monkeypatch.setattr(commands, "_is_terminal", lambda: True)
    result = run("rm", "qwen3-0.6b", stdin=answer)
    assert result.exit_code == 0, result.output
    assert "Delete qwen3-0.6b (" in result.output
    assert pulled.exists() is not deleted


def test_rm_never_deletes_outside_the_caches(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in (str(mine), str(tmp_path), "..", "/"):
        result = run("rm", name, "--yes")
        assert result.exit_code == 2
        assert "in no cache; delete it yourself" in result.stderr
    assert mine.exists()


def test_rm_deletes_no_copy_of_a_model(pulled: Path, caches: Path) -> None:
    """A model that was copied on the hub has the same commits."""
    hub = caches / "hub"
    copies = [f"models--org{number}--copy" for number in range(8)]
    for name in copies:
        shutil.copytree(hub / "models--Qwen--Qwen3-0.6B", hub / name, symlinks=True)
    result = run("rm", "qwen3-0.6b", "--yes")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in hub.glob("models--*")) == copies


def test_rm_deletes_what_a_download_left_without_a_commit(caches: Path) -> None:
    folder = caches / "hub" / "models--org--begun"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "blobs" / "0.partial").write_bytes(bytes(1000))
    assert run("rm", "org/begun", "--yes").exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("of_hub", [True, False])
def test_rm_does_not_follow_links(pulled: Path, caches: Path, of_hub: bool) -> None:
    folder = caches / "own" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of it")
    if of_hub:
        folder = caches / "hub" / "models--Qwen--Qwen3-0.6B"
    folder.rename(caches / "elsewhere")
    folder.symlink_to(caches / "elsewhere")
    result = run("rm", "qwen3-0.6b" if of_hub else "smollm2-135m", "--yes")
    assert result.exit_code == 2, result.output
    assert f"is a link to {caches / 'elsewhere'}" in result.stderr
    assert folder.is_symlink()
    assert any((caches / "elsewhere").iterdir())


def test_rm_deletes_a_model_of_the_package_index(caches: Path) -> None:
    folder = caches / "own" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of it")
    assert [(model.name, model.state) for model in local_models()] == [("smollm2-135m", "incomplete")]
    assert run("rm", "smollm2-135m", "--yes").exit_code == 0
    assert (folder.exists(), folder.parent.exists()) == (False, True)


def test_rm_refuses_a_model_that_is_served(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = ServerStatus(model="m", names=(QWEN,), address="http://127.0.0.1:1", started=0.0, state="ready")
    servers: list[Any] = [RunningServer(socket="", pid=1, status=status)]
    monkeypatch.setattr("chairlift.server.process.running.running_servers", lambda: servers)
    result = run("rm", "qwen3-0.6b", "--yes")
    assert result.exit_code == 2
    assert "is served at http://127.0.0.1:1; stop that first" in result.stderr
    assert pulled.exists()
