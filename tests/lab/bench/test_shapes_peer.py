"""`bench shapes` beside a peer, each in a process of its own, with a stub of the peer's package."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.models import dummy
from chairlift_lab.bench import shapes
from chairlift_lab.bench.shapes import ShapePeer, only_this_gpu, run_own, valid_part
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.model_shapes import Cases, ShapeRun, make_cases
from chairlift_lab.peers.peers import PROGRAMS, PeerProcess
from tests.kernels.tiny_config import CONFIG

ROW = {
    "name": "decode-2",
    "requests": 2,
    "prompt_tokens": 8,
    "output_tokens": 16,
    "seconds": 1.0,
    "floor_seconds": 0.5,
    "steps": 9,
    "device_seconds": 0.7,
    "host_seconds": 0.2,
    "tokens_per_second": 16.0,
    "share_of_floor": 0.5,
}
OWN = ShapeRun([ROW] * 2, Ceilings(1e9, 1e12), 3.0, 300)


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny shape, and a stub of vLLM 1.2.3 on the path."""
    packages = tmp_path / "packages"
    (packages / "vllm-1.2.3.dist-info").mkdir(parents=True)
    (packages / "vllm-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n")
    (packages / "vllm.py").write_text((Path(__file__).parent / "fake_vllm.py").read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(CONFIG))
    return file


def bench(shape: Path, *options: str) -> Result:
    command = ["bench", "shapes", str(shape), "--device", "cpu", "--cases", "decode-2,prefill-1", "--scale", "32"]
    return CliRunner().invoke(app, [*command, *options])


def test_the_peer_gets_the_same_cases(shape: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = bench(shape, "--peer", "vllm", "--json", str(report), "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 0, result.output
    assert "vLLM 1.2.3" in result.output
    assert "vLLM tokens/s" in result.output

    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert logged[0][1] | {"model": ""} == {
        "model": "",
        "config": CONFIG,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "enable_prefix_caching": True,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "gdn_prefill_backend": "triton",  # flashinfer is not installed
    }
    assert logged[1] == ["gpus", ""]
    first, warm_up, decode, _, prefill = (content for kind, content in logged[2:] if kind == "asked")
    assert len(first) == 1
    assert [prompt[::-1] for prompt, _ in warm_up] == [prompt for prompt, _ in decode]
    for case, asked in zip(make_cases(["decode-2", "prefill-1"], 300, 32), (decode, prefill), strict=True):
        assert [prompt for prompt, _ in asked] == case.prompts
        assert [how["max_tokens"] for _, how in asked] == case.outputs
        assert all((how["temperature"], how["ignore_eos"]) == (0.0, True) for _, how in asked)

    written = json.loads(report.read_text())
    settings, rows = written["settings"], written["rows"]
    assert settings["start_seconds"] > settings["ready_seconds"] > 0
    assert settings["peer"].pop("start_seconds") > 0
    assert settings["peer"] == {"name": "vllm", "version": "1.2.3", "failure": None}
    assert [row["name"] for row in rows] == ["decode-2", "prefill-1"]
    for row in rows:
        assert row["times_peer"] == pytest.approx(row["tokens_per_second"] / row["peer_tokens_per_second"])
        assert f"{row['times_peer']:.2f}x" in result.output


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [("dies", "RuntimeError: the engine did not start"), ("is short", "10 tokens in 2 answers, but 12 in 2 wanted")],
)
def test_our_result_is_kept_when_the_peer_fails(
    behaviour: str, expected: str, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", behaviour)
    monkeypatch.setattr(shapes, "run_own", lambda *how, **more: (OWN, 5.0))
    report = tmp_path / "report.json"
    result = bench(shape, "--peer", "vllm", "--json", str(report))
    assert result.exit_code == 2
    assert "vLLM ended with status 1: " in result.output
    assert expected in " ".join(result.output.split())
    # The cause may be far above the last line.
    assert ("no room for 3 blocks" in result.output) == (behaviour == "dies")
    assert "decode-2" in result.output
    written = json.loads(report.read_text())
    assert expected in written["settings"]["peer"]["failure"]
    assert written["rows"] == OWN.rows


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ({"start_seconds": 3.0, "seconds": [1.0]}, [1.0]),
        ({"start_seconds": 3.0}, []),
        ({"seconds": [1.0]}, None),
        ({"start_seconds": 3.0, "seconds": [0.0]}, None),
        ({"start_seconds": 3.0, "seconds": [1.0] * 3}, None),
    ],
)
def test_a_partial_answer_is_kept_if_it_is_valid(answer: dict[str, Any], kept: list[float] | None) -> None:
    part = valid_part(answer, num_cases=2)
    assert (part and part["seconds"]) == kept


def test_our_result_is_kept_when_the_peer_is_interrupted(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes, "run_own", lambda *how, **more: (OWN, 5.0))
    monkeypatch.setattr(ShapePeer, "_run", interrupted)
    report = tmp_path / "report.json"
    result = bench(shape, "--peer", "vllm", "--json", str(report))
    assert result.exit_code == 130
    assert "decode-2" in result.output
    written = json.loads(report.read_text())
    assert written["rows"] == OWN.rows
    assert written["settings"]["peer"]["start_seconds"] is None


def test_cases_that_the_peer_completed_before_a_failure_are_kept(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies of prompts")
    own = replace(OWN, rows=[ROW, ROW | {"name": "prefill-1"}])
    monkeypatch.setattr(shapes, "run_own", lambda *how, **more: (own, 5.0))
    report = tmp_path / "report.json"
    result = bench(shape, "--peer", "vllm", "--json", str(report), "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 2
    assert "too long a prompt" in result.output
    written = json.loads(report.read_text())
    assert "too long a prompt" in written["settings"]["peer"]["failure"]
    decode, prefill = written["rows"]
    assert decode["times_peer"] == decode["peer_seconds"] > 0
    assert f"{decode['times_peer']:.2f}x" in result.output
    assert "times_peer" not in prefill


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--peer", "sglang"], "--peer: there is no 'sglang'; choose from vllm"),
        (["--peer", "vllm", "--peer-python", "nowhere/python"], "--peer-python: there is no "),
        (["--peer", "vllm", "--peer-python", "/bin/false"], "--peer-python: /bin/false: ended with status 1"),
        (["--peer", "vllm", "--peer-timeout", "0"], "--peer-timeout: must be above 0"),
        (["--peer", "vllm", "--quantization", "int4"], "--quantization: cannot be compared"),
        (["--peer", "vllm", "--quantization", "int8"], "--quantization: cannot be compared"),
        (["--peer", "vllm", "--kv-dtype", "bfloat16"], "--kv-dtype: cannot be compared"),
        (["--peer-python", sys.executable], "--peer-python: has no effect without --peer"),
        (["--peer-timeout", "9"], "--peer-timeout: has no effect without --peer"),
    ],
)
def test_bad_options_are_refused(options: list[str], expected: str, shape: Path) -> None:
    result = bench(shape, *options)
    assert result.exit_code == 2
    assert expected in result.output


def test_a_python_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bare = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    if not bare.exists() or bare == Path(sys.executable):
        pytest.skip("no Python besides this one")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    with pytest.raises(InvalidParameter, match=r"peer_python: .* has no package vllm"):
        ShapePeer("vllm", bare).version()


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ("nowhere", InvalidParameter, "^shape: there is no file 'nowhere'"),
        ("empty", ChairliftError, "^empty: there is no config.json"),
    ],
)
def test_errors_of_our_process_are_raised_here(
    shape: str, kind: type, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import shapes as programs

    def ask(process: PeerProcess, job: dict[str, Any], *others: Any) -> dict[str, Any]:
        """In this process, which has imported everything."""
        lines: list[dict[str, Any]] = []
        programs.run_ours(job | {"started": 0.0}, lambda **content: lines.append(content))
        return lines[-1]

    monkeypatch.setattr(PeerProcess, "run", ask)
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    config = EngineConfig(device="cpu", load_format="dummy")
    with pytest.raises(ChairliftError, match=message) as raised:
        run_own(Cases(shape, config, ["decode-1"]), print)
    assert type(raised.value) is kind


def test_a_peer_sees_only_the_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = EngineConfig(device="cuda")
    assert only_this_gpu(config) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    second = replace(config, device="cuda:1")
    assert only_this_gpu(second) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert only_this_gpu(second) == {"CUDA_VISIBLE_DEVICES": "6"}


def test_a_peer_that_draws_other_weights_is_refused(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "draws its own weights")
    result = bench(shape, "--peer", "vllm")
    assert result.exit_code != 0
    assert "drew its own random weights" in result.output


def test_weights_of_vllm_are_drawn_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROGRAMS)
    import shapes as programs

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Sequential(torch.nn.LayerNorm(256)))
    model.register_buffer("w13_weight", torch.zeros(8, 4, 16, dtype=torch.uint8))
    model.register_buffer("w13_weight_scale", torch.zeros(8, 4, 1, dtype=torch.uint8))
    model.register_buffer("eight_bits", torch.zeros(64, 64, dtype=torch.float8_e4m3fn))
    for part in model.modules():  # as vLLM's loader does
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        programs.draw_all(part)
        if part is not model:
            assert all(bool((weight == before[name]).all()) for name, weight in model.state_dict().items())
    weights = model.state_dict()
    assert float(weights["0.weight"].std()) == pytest.approx(programs.SPREAD, rel=0.1)
    assert float(weights["eight_bits"].float().std()) == pytest.approx(programs.SPREAD, rel=0.1)
    assert float(weights["0.bias"].min()) == float(weights["1.0.weight"].max()) == 1.0
    assert weights["w13_weight"].unique().numel() > 100
    assert weights["w13_weight_scale"].unique().tolist() == [120]
    programs._draw(torch.empty(4, 4, device="meta"))  # nothing to draw yet
    assert programs.SPREAD == dummy.SPREAD
