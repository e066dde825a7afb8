"""`bench long-context` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.long_context import LongContextSettings
from tests.kernels.tiny_config import CONFIG
from tests.tiny import write_tiny_checkpoint


@pytest.mark.usefixtures("one_thread")
def test_prompts_may_be_longer_than_the_config_allows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert CONFIG["max_position_embeddings"] == 128
    result = tmp_path / "result.json"
    command = f"bench long-context --model-config {tmp_path} --device cpu --quantization none --json {result}"
    outcome = CliRunner().invoke(
        app, [*command.split(), "--lengths", "100,300", "--output-tokens", "4", "--max-prefill-tokens", "64"]
    )
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(result.read_text())
    assert report["settings"]["chunk"] == 64
    short, long = report["rows"]
    assert (short["chunks"], long["chunks"]) == (2, 5)
    # One layer: queries and keys of four heads of 16, and all pairs of a token and one before it or itself.
    attention = 4 * 4 * 16 * (300 * 301 / 2)
    weights = 32 * 128 + 64 * 32 + 3 * 32 * 48
    flops = 300 * 2 * 32 * 128 + attention  # what follows the attention of the last layer is for one token
    assert long["prefill_floor_seconds"] == pytest.approx(flops / report["settings"]["flops_per_second"])
    kv = 4 * 2 * 2 * 16  # float32: bytes of a token
    assert (short["kv_bytes"], long["kv_bytes"]) == (100 * kv, 300 * kv)
    bandwidth = report["settings"]["bytes_per_second"]
    assert long["tpot_floor_seconds"] == pytest.approx((4 * (weights + 32 * 300) + 302 * kv) / bandwidth)
    assert long["attention_floor_seconds"] == pytest.approx(300 * kv / bandwidth, rel=0.03)  # and the query and result
    assert long["kv_floor_seconds"] == pytest.approx(302 * kv / bandwidth)
    for row in (short, long):
        beyond_weights = row["tpot_seconds"] - (row["tpot_floor_seconds"] - row["kv_floor_seconds"])
        assert row["kv_times_floor"] == pytest.approx(beyond_weights / row["kv_floor_seconds"])
        assert row["attention_times_floor"] == pytest.approx(row["attention_seconds"] / row["attention_floor_seconds"])
        assert 0 < row["prefill_floor_seconds"] < row["prefill_seconds"]
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="lengths"):
        LongContextSettings(lengths=[])
    with pytest.raises(InvalidParameter, match="output_tokens"):
        LongContextSettings(output_tokens=1)
    tiny = write_tiny_checkpoint(tmp_path / "tiny")  # a real one is not made longer
    for options, named in (
        (f"{tiny} --lengths 300", "--lengths"),
        ("--max-model-len 64", "--max-model-len"),
        ("--no-prefix-caching", "--prefix-caching"),
    ):
        outcome = CliRunner().invoke(app, f"bench long-context --device cpu {options}".split())
        assert outcome.exit_code == 2, outcome.output
        assert named in outcome.output
