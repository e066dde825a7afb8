"""guidellm and aiperf measure the server; their reports count what was sent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running_server import NAME, RunningServer, start_server
from tests.tiny import write_tiny_checkpoint
from tests.tools import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 40, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("measured") / "tiny", positions=512)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of its own, so that its counters are those of one run."""
    running = start_server(folder, tmp_path_factory.mktemp("measured_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()


def program(name: str) -> str:
    """The path of a program: beside this interpreter, in a virtual environment of its own, or in PATH."""
    for folder in (Path(sys.executable).parent, Path(sys.prefix) / name / "bin"):
        if (folder / name).exists():
            return str(folder / name)
    return shutil.which(name) or missing(f"{name} is not installed: make test-all installs it")


def run(command: list[str], folder: Path) -> None:
    # aiperf cannot read a tokenizer from a local folder when the hub is switched off.
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def generated(server: RunningServer) -> float:
    return server.metric("chairlift_output_tokens_total")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(measured: RunningServer, folder: Path, tmp_path: Path, path: str) -> None:
    before = generated(measured)
    command = [program("guidellm"), "run", "--disable-console"]
    options = {
        "backend": f"kind=openai_http,target={measured.url},model={NAME},request_format={path}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={folder}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "output": "kind=json,path=report.json",
    }
    run([*command, *(word for key, value in options.items() for word in (f"--{key}", value))], tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    output = metrics["output_token_count"]["successful"]
    assert output["min"] == output["max"] == OUTPUT_TOKENS
    assert metrics["prompt_token_count"]["successful"]["min"] >= PROMPT_TOKENS
    first = metrics["time_to_first_token_ms"]["successful"]["mean"]
    assert 0 < first <= metrics["request_latency"]["successful"]["mean"] * 1000
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] > 0
    assert generated(measured) - before == output["total_sum"] >= REQUESTS * OUTPUT_TOKENS


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages", "embeddings"])
def test_aiperf(measured: RunningServer, folder: Path, tmp_path: Path, endpoint: str) -> None:
    before = generated(measured)
    command = [program("aiperf"), "profile", "--endpoint-type", endpoint, "--ui", "none", "--no-gpu-telemetry"]
    options: dict[str, Any] = {
        "model": NAME,
        "url": measured.url,
        "tokenizer": folder,
        "concurrency": 2,
        "request-count": REQUESTS,
        "isl": PROMPT_TOKENS,
        "artifact-dir": tmp_path / "report",
    }
    if endpoint != "embeddings":
        options |= {"osl": OUTPUT_TOKENS, "extra-inputs": "ignore_eos:true"}
        command += ["--streaming", "--use-server-token-count"]
    run([*command, *(str(word) for key, value in options.items() for word in (f"--{key}", value))], tmp_path)
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["is_complete"]
    assert report["error_summary"] == []
    assert report["request_latency"]["min"] > 0
    if endpoint != "embeddings":
        assert 0 < report["time_to_first_token"]["avg"] <= report["request_latency"]["avg"]
        assert generated(measured) - before == REQUESTS * OUTPUT_TOKENS
    # aiperf reads the usage of responses that are complete, and max_output_tokens makes these incomplete.
    if endpoint not in ("embeddings", "responses"):
        length = report["output_sequence_length"]
        assert length["min"] == length["max"] == OUTPUT_TOKENS
        assert report["inter_token_latency"]["avg"] > 0
