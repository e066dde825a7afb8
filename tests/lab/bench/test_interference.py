"""`bench interference`: long prompts beside requests that generate, on this engine over HTTP and on stubs of peers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench.interference import COLUMNS, Interference, Traffic
from chairlift_lab.common.engines import Measurement
from tests.tiny import write_tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


def test_gaps_are_those_of_the_requests_that_generate() -> None:
    """Two generate, with gaps of 1 s and one of 5; then a long and a short prompt arrive, twice."""
    times = [[1.0, 2.0, 7.0], [1.0, 2.0, 3.0], [6.0, 6.5], [4.0], [9.0], [9.5]]
    run = Interference("ours", 2, Measurement(10.0, 100, times, arrivals=[0.0, 0.0, 2.0, 3.0, 6.0, 7.5]))
    row = run.row()
    assert sorted(gap for _, gap in run.gaps) == [1.0, 1.0, 1.0, 5.0]
    assert (row["gap_p50_ms"], row["gap_worst_ms"], row["worst_of_median"]) == (1000, 5000, 5)
    assert (row["ttft_long_p50_ms"], row["ttft_long_worst_ms"]) == (3500, 4000)
    assert (row["ttft_short_p50_ms"], row["ttft_short_worst_ms"]) == (1500, 2000)
    assert (row["output_tokens_per_s"], row["total_tokens_per_s"]) == (1.1, 11.1)


def test_long_and_short_prompts_come_in_turn() -> None:
    traffic = Traffic(output=16, start=5, prompts=3, prompt_len="50:90", answer=2)
    requests = traffic.workload(range(100), 4).requests
    assert [(len(each.prompt_ids), each.n_out) for each in requests[:4]] == [(5, 16)] * 4
    assert [each.n_out for each in requests[4:]] == [2] * 6
    assert all(50 <= len(each.prompt_ids) <= 90 for each in requests[4::2])
    assert {len(each.prompt_ids) for each in requests[5::2]} == {5}
    assert requests == traffic.workload(range(100), 4).requests


def test_this_engine_and_peers_are_measured_on_the_same_traffic(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "fake_peer.py").read_text())
    fake.chmod(0o755)
    (tmp_path / "model.gguf").touch()
    tiny = write_tiny_checkpoint(tmp_path / "tiny", positions=512)
    traffic = "--decodes 2 --output 40 --prompts 2 --prompt-len 60:120 --answer 2 --what-if budget=fixed"
    peers = [f"--peer-python=llama.cpp={fake}", f"--peer-model=llama.cpp={tmp_path / 'model.gguf'}"]
    files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "gaps.png")]
    options = ["--model", str(tiny), "--kv-memory", "2MiB", "--peers", "llama.cpp,openvino", *peers, "-q", *files]
    done = CliRunner().invoke(app, ["bench", "interference", *traffic.split(), *options])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "result.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["chairlift", "chairlift, budget=fixed", "llama.cpp"]
    assert list(report["settings"]["skipped"]) == ["openvino"]
    assert "No row for openvino" in done.output
    assert (tmp_path / "gaps.png").stat().st_size > 1000
    peer = report["rows"][-1]
    assert peer["gap_worst_ms"] == pytest.approx(1000)  # the stub's requests come one after the other
    documented = DOCUMENT.read_text().partition("## `bench interference`")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in documented for name in peer.keys() - {"name"})
    assert {column.value for column in COLUMNS} <= peer.keys()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--decodes", "0"], "must be at least 1, got 0"),
        (["--prompt-len", "9:5"], "must rise from at least 1"),
        (["--what-if", "speed=9"], "must be name=value"),
        (["--peer-timeout", "5"], "has no effect without --peers"),
        (["--peers", "sglang"], "sglang"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(options: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, ["bench", "interference", "-q", *options])
    assert done.exit_code == 2
    assert problem in " ".join(done.output.split())
