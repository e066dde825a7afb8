"""Latency and the speed of kernels: the arithmetic of the floors, and runs on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.kernels import KINDS, KernelSettings
from chairlift_lab.bench.latency import LatencySettings
from chairlift_lab.common.timing import process_age
from chairlift_lab.report.options import parse_names
from tests.kernels.tiny_config import CONFIG


def run(tmp_path: Path, command: str, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = tmp_path / "result.json"
    command = f"{command} --model-config {tmp_path} --device cpu --quantization none --json {result}"
    outcome = CliRunner().invoke(app, command.split())
    assert outcome.exit_code == 0, outcome.output
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@pytest.mark.usefixtures("one_thread")
def test_latency_of_a_tiny_model(tmp_path: Path) -> None:
    lengths = "--batch 1,3 --prompt-tokens 8 --output-tokens 5 --repeat 2 --kv-memory 4MiB"
    report = run(tmp_path, f"bench latency {lengths}")
    rows = report["rows"]
    assert [(row["prompt_tokens"], row["batch"]) for row in rows] == [(8, 1), (8, 3)]
    for row in rows:
        assert 0 < row["ttft_floor_ms"] < row["last_ttft_ms"]
        assert row["ttft_ms"] <= row["last_ttft_ms"] < row["e2e_ms"]
        assert row["tpot_share_of_floor"] == pytest.approx(row["tpot_floor_ms"] / row["tpot_ms"])
    settings = report["settings"]
    # The weights of a step: qkv, output, gate and up, down, and the head, in float32; then keys and values of two
    # heads for the 8 + (1 + 2 + 3 + 4) / 4 tokens that a token sees on average.
    weights = 4 * (32 * 128 + 64 * 32 + 3 * 32 * 48 + 32 * 300)
    expected = (weights + 4 * 2 * 2 * 16 * (8 + 10 / 4)) / settings["bytes_per_second"]
    assert rows[0]["tpot_floor_ms"] == pytest.approx(1e3 * expected)
    assert settings["first_token_seconds"] > 0


@pytest.mark.usefixtures("one_thread")
def test_kernels_of_a_tiny_model(tmp_path: Path) -> None:
    report = run(tmp_path, "bench kernels --rows 4 --batch 2 --contexts 33")
    rows = {row["name"]: row for row in report["rows"]}
    assert {row["kind"] for row in report["rows"]} == {"products", "attention", "norms", "sampling"}
    assert len(rows) == 5 + 2 + 1 + 2
    product = rows["gate, up 32→96, 4 rows"]
    assert product["flops"] == 2 * 4 * 32 * 96
    assert product["bytes"] == 4 * (32 * 96 + 4 * (32 + 96))
    decode, prompt = rows["attention, decode, 2 of 33 tokens"], rows["attention, prompt, 33 tokens"]
    assert decode["flops"] == 2 * 33 * 4 * 4 * 16
    assert prompt["flops"] == 33 * 34 // 2 * 4 * 4 * 16
    for row in report["rows"]:
        assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert row["floor_seconds"] >= row["bytes"] / report["settings"]["bytes_per_second"]
        share = row["bytes_per_second"] / report["settings"]["bytes_per_second"]
        assert row["share_of_bandwidth"] == pytest.approx(share)


@pytest.mark.usefixtures("one_thread")
def test_kernels_of_latent_attention(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"model_type": "youtu", "num_attention_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None}
    shape |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "hidden_size": 32, "vocab_size": 300}
    shape |= {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    report = run(tmp_path, "bench kernels --kernels attention --batch 2 --contexts 33", shape)
    decode, prompt = report["rows"]
    up = 4 * (16 + 12) * 32
    assert decode["flops"] == 2 * 33 * 2 * 4 * (40 + 32) + 2 * 2 * up  # absorbed
    assert decode["bytes"] == 2 * 33 * 40 * 4 + 4 * up + 2 * 4 * 24 * 4
    assert prompt["flops"] == 33 * 34 // 2 * 2 * 4 * (24 + 12) + 2 * 33 * up  # expanded


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="kernels"):
        parse_names("kernels", "products,magic", KINDS)
    with pytest.raises(InvalidParameter, match="rows"):
        KernelSettings(rows=[0])
    with pytest.raises(InvalidParameter, match="output_tokens"):
        LatencySettings(output_tokens=1)
    outcome = CliRunner().invoke(app, ["bench", "latency", "--model-config", "nowhere.json", "--device", "cpu"])
    assert outcome.exit_code == 2
    assert "--model-config" in outcome.output
    for command in (
        "kernels --policy static",
        "kernels --max-model-len 64",
        "latency --speculate ngram",
        "latency --draft-length 2",
    ):
        outcome = CliRunner().invoke(app, f"bench {command} --device cpu".split())
        assert outcome.exit_code == 2
        assert command.split()[1] in outcome.output


def test_the_age_of_this_process_grows() -> None:
    first, second = process_age(), process_age()
    assert first is not None
    assert second is not None
    assert 0 < first <= second
