"""chairlift simulate, plan and bench profile from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.core.targets import NO_TARGETS, parse_classes
from chairlift_lab.commands.simulate import _rounded
from chairlift_lab.common.workload import LengthRange
from chairlift_lab.planning.machine import MachineOptions
from chairlift_lab.planning.prediction import ReplicaSettings, highest_rate
from tests.kernels.tiny_config import CONFIG
from tests.lab.simulate.speed import COST

HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
}


def run(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, [*arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_plan_counts_memory_exactly(tmp_path: Path) -> None:
    result = tmp_path / "plan.json"
    options = "--device h200 --rate 100 --target-tpot-ms 20 --prompt-len 256 --output-len 32"
    files = ("--json", str(result), "--plot", str(tmp_path / "plan.png"))
    text = run("plan", "--model", "llama3-8b", *options.split(), *files)
    (row,) = json.loads(result.read_text())["rows"]
    assert row["weight_bytes"] == 2 * 8_030_261_248
    assert row["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert row["kv_blocks"] == int((0.9 * 141e9 - row["weight_bytes"]) // (16 * row["kv_bytes_per_token"]))
    assert row["replicas"] * row["highest_rate"] >= 100
    assert "Replicas for 100 requests/s" in text
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(("kv_dtype", "bytes_per_head"), [("bfloat16", 2 * 128), ("int8", 128 + 4), ("fp8", 128)])
def test_plan_counts_the_scales_of_an_8_bit_cache(kv_dtype: str, bytes_per_head: int, tmp_path: Path) -> None:
    result = tmp_path / "plan.json"
    options = ("--model", "llama3-8b", "--kv-dtype", kv_dtype, "--prompt-len", "8", "--output-len", "8")
    run("plan", *options, "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    assert row["kv_bytes_per_token"] == 2 * 32 * 8 * bytes_per_head


def test_plan_counts_the_states_of_recurrent_layers(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HYBRID))
    options = ("--model", str(config), "--device", "h200", "--memory", "0.01", "--prompt-len", "8", "--output-len", "8")
    result = tmp_path / "plan.json"
    text = run("plan", *options, "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    convolution, recurrent = (2 * 64 + 4 * 64) * 3 * 4, 4 * 64 * 64 * 4
    assert row["state_bytes"] == 3 * (convolution + recurrent)
    left = 0.9 * 0.01e9 - row["weight_bytes"]
    assert row["largest_batch"] == left // 2 // row["state_bytes"]
    assert f"{row['state_bytes'] / 1e6:.1f} MB per request x {row['largest_batch']}" in text


def test_plan_counts_groups_as_the_engine_does(tmp_path: Path) -> None:
    """Half of the layers of gpt-oss see 128 tokens: 1.9 times as many long requests fit, and not more short ones."""
    options = ["--model", "gpt-oss-20b", "--device", "h200", "--dtype", "int4", "--prompt-len", "30000:30000"]
    result = tmp_path / "plan.json"
    text = run("plan", *options, "--output-len", "1000", "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    assert "12 layers with a window of 128 tokens and 12 layers with the whole context, in 2 block tables" in text
    one_table = row["kv_blocks"] * 16 / 30_500
    assert 1.9 < row["largest_batch"] / one_table < 2.0
    assert row["highest_rate"] > 0


def test_short_requests_gain_nothing_from_windows() -> None:
    _, _, memory = MachineOptions(model="gpt-oss-20b", device="h200", dtype="int4").resolve()
    assert memory.requests_of(96) <= memory.num_tokens // 96
    assert memory.blocks_of_one_table(96) == memory.num_blocks
    assert memory.blocks_of_one_table(32_768) > 1.9 * memory.num_blocks


def test_a_model_that_does_not_fit_is_reported() -> None:
    outcome = CliRunner().invoke(app, ["plan", "--model", "llama3-8b", "--device", "l4", "--memory", "12"])
    assert outcome.exit_code == 2
    assert "16.1 GB of weights" in outcome.output.replace("\n", " ")
    assert "2 such devices" in outcome.output.replace("\n", " ")


def test_plan_without_targets_does_not_mention_them() -> None:
    text = run("plan", "--model", "smollm2-135m", "--device", "h200", "--prompt-len", "8", "--output-len", "2")
    assert "target" not in text
    assert "Highest rate" in text
    assert "e+" not in text


def test_the_highest_rate_of_a_plan_is_one_that_a_replica_sustains(tmp_path: Path) -> None:
    """A replica with four times this rate of requests finishes about as many of them; with targets it is not more."""
    files = [tmp_path / name for name in ("plan.json", "simulation.json", "targets.json")]
    traffic = ["--model", "qwen3-0.6b", "--device", "l4", "--prompt-len", "64:512", "--output-len", "32:128"]
    run("plan", *traffic, "--json", str(files[0]))
    (row,) = json.loads(files[0].read_text())["rows"]
    rate, most = row["highest_rate"], str(min(row["largest_batch"], 1024))
    load = ["--rate", str(4 * rate), "--requests", "6000", "--max-batch-requests", most, "--budget", "fixed"]
    run("simulate", *traffic, *load, "--json", str(files[1]))
    (overloaded,) = json.loads(files[1].read_text())["rows"]
    assert overloaded["requests_per_s"] == pytest.approx(rate, rel=0.2)
    run("plan", *traffic, "--target-ttft-ms", "100000", "--json", str(files[2]))
    assert json.loads(files[2].read_text())["rows"][0]["highest_rate"] == rate


def test_a_plan_keeps_each_class_inside_its_targets() -> None:
    lengths = LengthRange(64, 512), LengthRange(32, 32)
    settings = ReplicaSettings(num_blocks=2000, slots=16, order="slack")

    def best(ttft: int) -> float:
        classes = parse_classes([f"interactive=ttft:{ttft}", "batch=e2e:60000"]).values()
        return highest_rate(settings, COST, *lengths, NO_TARGETS, [*classes], count=100)

    assert best(3000) > best(30) > 0
    both = ["plan", "--class", "interactive=ttft:5", "--target-ttft-ms", "5"]
    outcome = CliRunner().invoke(app, both)
    assert outcome.exit_code == 2
    assert "have targets of their own" in outcome.output


def test_simulate_hints_at_the_option_for_a_file() -> None:
    outcome = CliRunner().invoke(app, ["simulate", "traffic.csv"])
    assert outcome.exit_code == 2
    assert "--trace traffic.csv" in outcome.output


def test_rounded_numbers_have_no_exponent() -> None:
    assert [_rounded(value) for value in (34_712.0, 99.96, 12.345, 0.001234)] == ["34,700", "100", "12.3", "0.00123"]


@pytest.mark.parametrize("options", [("--policy", "static"), ("--replicas", "3", "--router", "round-robin")])
def test_simulate_random_traffic(options: tuple[str, ...], tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    run(*["simulate", "--model", "qwen3-0.6b", "--rate", "50", "--requests", "60"], *options, "--json", str(result))
    (row,) = json.loads(result.read_text())["rows"]
    assert row["requests"] == 60
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["e2e_p99_ms"]
    assert 0 < row["utilisation"] <= 1


def test_simulate_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,20\n0.5,2000,5\n0.6,10,300\n")
    result = tmp_path / "result.json"
    files = ("--json", str(result), "--plot", str(tmp_path / "trace.png"))
    run("simulate", "--model", "qwen3-0.6b", "--trace", str(trace), *files)
    assert (tmp_path / "trace.png").stat().st_size > 1000
    (row,) = json.loads(result.read_text())["rows"]
    assert row["requests"] == 3
    assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(325)


def test_the_simulator_uses_a_profile_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    profile, result = tmp_path / "profile.json", tmp_path / "result.json"
    options = "--load-format dummy --device cpu --max-batch-requests 4 --kv-memory 16MiB --rounds 1 --quiet"
    options += " --record --requests 82 --prompt-len 4:16 --output-len 2:8"
    text = run("bench", "profile", "--model", str(tmp_path), *options.split(), "--out", str(profile))
    assert "output_tokens_per_s" in text
    saved = json.loads(profile.read_text())
    assert saved["steps"] > 20
    assert saved["other_programs"] is None or 0 <= saved["other_programs"] <= 1
    assert [len(part) for part in saved["run"]["parts"]] == [41, 41]
    assert saved["prices"]["step"] + sum(price for _, price in saved["prices"]["tokens"]) > 0
    run(
        *("simulate", "--model", str(tmp_path), "--profile", str(profile), "--rate", "5", "--requests", "20"),
        *("--prompt-len", "8:32", "--output-len", "4:16", "--json", str(result)),
    )
    assert json.loads(result.read_text())["rows"][0]["requests"] == 20
    run("simulate", "--against", str(profile), "--json", str(result))
    compared = {row["name"]: row for row in json.loads(result.read_text())["rows"]}
    assert compared["output_tokens_per_s"]["measured"] == saved["run"]["measured"]["output_tokens_per_s"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("simulate", "--against", "FILE", "--rate", "3"), "rate: does not go with --against"),
        (("simulate", "--against", "FILE"), "against: cannot read"),
        (("simulate", "--profile", "FILE"), "profile: cannot read"),
        (("bench", "profile", "--requests", "3"), "requests: only goes with --record"),
        (("bench", "profile", "--target-tpot-ms", "3"), "a profile needs steps of all sizes"),
    ],
)
def test_incompatible_options_are_refused(arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"prices": {"step": -1}}')
    outcome = CliRunner().invoke(app, [argument.replace("FILE", str(file)) for argument in arguments])
    assert outcome.exit_code == 2
    assert problem in " ".join(outcome.output.split())
