"""`bench throughput` on a tiny model: all engines serve all requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chairlift.errors import InvalidParameter
from chairlift_lab.bench.throughput import ALL_ENGINES, ENGINES, ThroughputComparison
from chairlift_lab.common.engines import TokenProgress
from chairlift_lab.common.workload import LengthRange, make_workload
from chairlift_lab.report.options import parse_names
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


class Watching:
    """Records the reported progress."""

    def __init__(self) -> None:
        self.reports: dict[str, list[int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[TokenProgress]:
        yield self.reports.setdefault(name, []).append


def test_every_engine_serves_the_whole_workload(folder: str) -> None:
    comparison = ThroughputComparison(folder, options={"device": "cpu"}, progress=False)
    workload = make_workload(
        comparison.vocabulary(), requests=5, prompt_len=LengthRange(4, 40), output_len=LengthRange(2, 6), seed=0
    )
    watching = Watching()
    rows = comparison.run(workload, watching)
    assert [row["name"] for row in rows] == list(ENGINES)
    for row in rows:
        assert row["output_tokens"] == workload.output_tokens
        assert row["input_tokens"] == workload.input_tokens
        assert row["requests"] == 5
        assert set(row["speedup_vs"]) == set(ENGINES) - {row["name"]}
        reported = watching.reports[row["name"]]
        assert reported[0] == 0
        assert reported == sorted(reported)
        assert reported[-1] == workload.output_tokens
    batched, single, _ = rows
    assert batched["mean_batch_requests"] > 1
    assert single["mean_batch_requests"] == 1
    assert single["steps"] > batched["steps"]
    assert 0 < batched["scheduler_share"] < 1
    assert batched["peak_kv_blocks"] > single["peak_kv_blocks"]


def test_a_workload_longer_than_the_context_is_refused(folder: str) -> None:
    workload = make_workload([5], requests=1, prompt_len=LengthRange(250, 250), output_len=LengthRange(7, 7), seed=0)
    comparison = ThroughputComparison(folder, ["chairlift"], {"device": "cpu"}, progress=False)
    with pytest.raises(InvalidParameter, match=r"257 tokens.*256"):
        comparison.run(workload, Watching())


def test_a_missing_package_of_transformers_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr("chairlift_lab.bench.throughput.find_spec", lambda name: None)
    workload = make_workload([5], requests=1, prompt_len=LengthRange(2, 2), output_len=LengthRange(1, 1), seed=0)
    with pytest.raises(InvalidParameter, match=r"engines: .*accelerate"):
        ThroughputComparison(str(file), options={"device": "cpu"}, progress=False).run(workload, Watching())


def test_settings_have_resolved_defaults(tmp_path: Path) -> None:
    settings = ThroughputComparison(
        "m", options={"device": "cpu", "max_batch_tokens": 32, "max_batch_requests": 8}
    ).settings()
    assert settings["device"] == "cpu"
    assert settings["dtype"] == "float32"
    assert settings["concurrency"] == 8
    assert settings["max_batch_tokens"] == settings["transformers_max_batch_tokens"] == 32


def test_engines_are_parsed() -> None:
    assert parse_names("engines", "transformers, chairlift", ALL_ENGINES) == ["transformers", "chairlift"]
    for text in ("", "vllm", "chairlift,chairlift"):
        with pytest.raises(InvalidParameter, match="engines: "):
            parse_names("engines", text, ALL_ENGINES)
