"""`bench attention`: counts are exact, times are present, and every key is documented."""

from __future__ import annotations

import json
import random
import re
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.attention import (
    EXPERIMENTS,
    KV_MEMORY,
    AttentionSettings,
    materialised,
    rows_of,
    run_attention,
)
from chairlift_lab.common.timing import growth, peak_bytes
from chairlift_lab.common.workload import SpreadLengths
from chairlift_lab.report.options import parse_names

CPU = torch.device("cpu")
DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"
SMALL = AttentionSettings(
    heads=4,
    kv_heads=2,
    head_dim=16,
    batches=(1, 3),
    variations=(0.0, 1.0),
    context=20,
    prompt=9,
    tiling_sizes=(32, 64),
    sharing_batch=2,
    cache_sizes=(2, 4),
)


@pytest.fixture(autouse=True)
def _measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift_lab.common.timing.best_seconds.__kwdefaults__", {"least": 0.0, "repeats": 1})


def test_everything_is_measured_and_counted() -> None:
    notes: list[str] = []
    rows = run_attention(SMALL, CPU, torch.float32, note=notes.append)
    modes, tiling, sharing, cache = (rows_of(experiment, rows) for experiment in EXPERIMENTS)
    assert len(modes) == 2 * 2 * 2
    for row in modes:
        assert {"ragged", "bursted", "padded"} <= set(row["seconds"])
        assert all(seconds > 0 for seconds in row["seconds"].values())
        prompt = 9 if row["kind"] == "mixed" else 1
        assert row["tokens"] == row["batch"] - 1 + prompt
        assert row["padding"] == (prompt - 1) * (row["batch"] - 1)
        assert row["padded_context"] >= row["context"]
    assert [(row["tokens"], row["full_seconds"] is not None) for row in tiling] == [(32, True), (64, True)]
    assert [row["kv_heads"] for row in sharing] == [32, 8, 1]
    mha, gqa, mqa = (row["bytes_per_token"] for row in sharing)
    assert mha == 2 * 32 * 16 * 4 == 4 * gqa == 32 * mqa
    assert sharing[0]["largest_batch"] == KV_MEMORY // (mha * 32)  # 20 tokens take two blocks of 16
    assert sharing[1]["largest_batch"] == 4 * sharing[0]["largest_batch"]
    assert [(row["cached_tokens"], row["recompute_tokens"]) for row in cache] == [(2, 3), (4, 10)]
    assert cache[0]["recompute_seconds"] < cache[1]["recompute_seconds"]
    assert len(notes) == 8 + 2 + 3 + 2


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    rows = run_attention(SMALL, CPU, torch.float32)
    assert {key for row in rows for key in row} <= documented
    assert set(AttentionSettings.__dataclass_fields__) <= documented


def test_the_full_score_matrix_gives_the_same_result_as_tiles() -> None:
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(materialised(q, k, v), expected)


def test_peak_memory_counts_memory_that_is_freed_again() -> None:
    def hold_briefly() -> None:
        torch.ones(64, 2**20, dtype=torch.uint8)

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system cannot measure it")
    assert peak_bytes(lambda: None, CPU) in range(8 * 2**20)
    assert peak_bytes(hold_briefly, CPU) in range(60 * 2**20, 80 * 2**20)


def test_growth_is_the_exponent_of_a_power_law() -> None:
    assert growth([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert growth([10, 100, 1000], [7, 7, 7]) == pytest.approx(0)


@pytest.mark.parametrize("variation", [0.0, 0.3, 1.0])
def test_lengths_have_the_given_mean_and_variation(variation: float) -> None:
    source = random.Random(0)
    lengths = [SpreadLengths(1000, variation, 20_000).draw(source) for _ in range(4000)]
    mean = statistics.mean(lengths)
    assert mean == pytest.approx(1000, rel=0.05)
    assert statistics.stdev(lengths) / mean == pytest.approx(variation, rel=0.05, abs=1e-9)
    assert min(lengths) >= 1
    assert max(SpreadLengths(10, 3.0, 25).draw(source) for _ in range(500)) == 25


def test_invalid_settings_are_refused_by_name() -> None:
    for name, value in [("kv_heads", 2), ("heads", 0), ("batches", ()), ("variations", (-1.0,)), ("cache_sizes", (0,))]:
        with pytest.raises(InvalidParameter) as refusal:
            AttentionSettings(**{name: value})  # type: ignore[arg-type]
        assert refusal.value.parameter == name
    for text in ("", "magic", "cache,cache"):
        with pytest.raises(InvalidParameter, match="experiments"):
            parse_names("experiments", text, EXPERIMENTS)


def test_the_command(tmp_path: Path) -> None:
    figures, picture = tmp_path / "a.json", tmp_path / "a.png"
    small = ["--batches", "1,2", "--context", "20", "--sizes", "32,64", "--cache-sizes", "2,4", "--device", "cpu"]
    made = CliRunner().invoke(
        app,
        ["bench", "attention", *small, "--json", str(figures), "--plot", str(picture)],
        env={"COLUMNS": "120"},
    )
    assert made.exit_code == 0, made.output
    for title in ("Modes", "Tiling", "Sharing", "Cache", "torch"):
        assert title in made.output
    report = json.loads(figures.read_text())
    assert report["bench"] == "attention"
    assert report["settings"]["context"] == 20
    assert {row["experiment"] for row in report["rows"]} == {"modes", "tiling", "sharing", "cache"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--sizes", "1k"], "sizes"), (["--plot", "picture.bmp"], "plot"), (["--plot", "nowhere/a.png"], "plot")],
)
def test_bad_options_are_refused_at_once(arguments: list[str], problem: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "attention", *arguments])
    assert refused.exit_code == 2
    assert f"--{problem}" in refused.output
