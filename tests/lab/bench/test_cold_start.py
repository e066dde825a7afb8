"""`chairlift bench cold-start`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift_lab.bench.cold_start import (
    ColdStartSettings,
    figures,
    folder_with_tokenizer,
    measure_starts,
    phase_table,
    start_phases,
)
from chairlift_lab.load.client import LoadRecord
from tests.kernels.tiny_config import CONFIG


def answered(sent: float, first: float, end: float, tokens: int = 3) -> LoadRecord:
    return LoadRecord(sent, sent, [first, end], end, 5, tokens)


def test_figures_of_a_load() -> None:
    records = [answered(0.0, 0.5, 1.0), answered(1.0, 1.1, 2.0), answered(7.5, 7.52, 8.0), answered(8.0, 8.04, 9.0)]
    failed = LoadRecord(2.0, 2.0, [], 2.5, error="HTTP 503")
    row = figures([*records, failed], ready=6.0, seconds=10.0)
    assert row["first_token_seconds"] == 6.5
    assert (row["requests"], row["failed"]) == (5, 1)
    assert row["ttft_p50_ms"] == pytest.approx(70.0)
    assert row["ttft_max_ms"] == pytest.approx(500.0)
    assert row["last_ttft_p50_ms"] == pytest.approx(30.0), "of those sent in the last quarter"
    assert row["output_tokens_per_s"] == pytest.approx(12 / 9)
    with pytest.raises(ChairliftError, match="the server did not answer: HTTP 503"):
        figures([failed], ready=6.0, seconds=10.0)


def test_phases_are_shown_in_their_order() -> None:
    text = """# TYPE chairlift_engine_start_seconds gauge
chairlift_engine_start_seconds{phase="imports"} 1.5
chairlift_engine_start_seconds{phase="warm_up"} 0.25
chairlift_engine_up 1.0
"""
    phases = start_phases(text)
    assert list(phases.items()) == [("imports", 1.5), ("warm_up", 0.25)]
    cold = {"start": "cold", "streams": 2, "ready_seconds": 2.0, "phase_seconds": {"imports": 1.0, "kernels": 3.0}}
    warm = {"start": "warm", "streams": 1, "ready_seconds": 2.0, "phase_seconds": phases}
    table = phase_table([cold, warm])
    cells = [[column.cell(row) for column in table.columns] for row in table.rows]
    assert [column.heading for column in table.columns][2:5] == ["imports", "kernels", "warm\nup"]
    assert cells == [
        ["cold", "2", "1.00", "3.00", "-", "4.00", "2.00"],
        ["warm", "1", "1.50", "-", "0.25", "1.75", "2.00"],
    ]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="streams"):
        ColdStartSettings(streams=(1, 0), seconds=1.0, prompt_len="4", output_len="4", seed=0)
    with pytest.raises(InvalidParameter, match="seconds"):
        ColdStartSettings(streams=(1,), seconds=0.0, prompt_len="4", output_len="4", seed=0)


def test_servers_are_loaded_from_their_start_with_an_empty_cache(tmp_path: Path) -> None:
    """A server with random weights and a tokenizer that has a word for every token."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    noted: list[str] = []
    options = {
        "load_format": "dummy",
        "device": "cpu",
        "quantization": "none",
        "attention": "bursted",
        "kv_memory": "1M",
    }
    with folder_with_tokenizer(str(config)) as folder:
        assert sorted(os.listdir(folder)) == ["config.json", "tokenizer.json"]
        settings = ColdStartSettings(streams=(2,), seconds=0.5, prompt_len="4:8", output_len="3", seed=1)
        rows = measure_starts(folder, options, range(1, 50), settings, noted.append)
    assert [(row["start"], row["streams"]) for row in rows] == [("cold", 2), ("warm", 1)]
    assert noted == ["cold start, 2 streams", "warm start"]
    for row in rows:
        assert row["requests"] > 0
        assert row["failed"] == 0
        assert row["first_token_seconds"] > row["ready_seconds"] > 0
        assert 0 < sum(row["phase_seconds"].values()) < row["ready_seconds"]
        assert [*row["phase_seconds"]][:3] == ["imports", "device", "tokenizer"]
        assert row["ttft_max_ms"] >= row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0
