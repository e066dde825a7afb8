"""`bench policies` on a tiny model: every strategy serves all requests, with the expected padding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.policies import AT_ONCE, POISSON, PoliciesSettings, Strategy, compare_policies
from chairlift_lab.common.engines import EngineMaker
from tests.tiny import write_tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"
NAMES = ("continuous", "dynamic", "static", "static/padded")
STRATEGIES = [Strategy.parse(text) for text in NAMES]
SMALL = PoliciesSettings(
    strategies=STRATEGIES, variations=(0.0, 1.0), requests=9, prompt=5, output=6, slots=3, max_delay_ms=5.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def maker(folder: str) -> EngineMaker:
    return EngineMaker.load(folder, {"device": "cpu", "kv_memory": "8MiB"})


@pytest.fixture(scope="module")
def rows(maker: EngineMaker) -> list[dict[str, Any]]:
    return compare_policies(maker, SMALL)


def test_every_strategy_serves_the_same_requests(maker: EngineMaker, rows: list[dict[str, Any]]) -> None:
    combinations = [(row["variation"], row["arrivals"], row["strategy"]) for row in rows]
    assert combinations == [(v, a, s) for v in (0.0, 1.0) for a in (AT_ONCE, POISSON) for s in NAMES]
    for variation in (0.0, 1.0):
        counts = {(row["requests"], row["output_tokens"]) for row in rows if row["variation"] == variation}
        assert counts == {(9, SMALL.workload(maker.vocabulary(), variation).output_tokens)}
    rates = {(row["variation"], row["rate"]) for row in rows if row["arrivals"] == POISSON}
    assert len(rates) == 2
    assert all(rate for _, rate in rates)
    for row in rows:
        assert 0 < row["latency_p50_ms"] <= row["latency_p99_ms"]
        assert row["peak_batch_requests"] <= 3


def test_padding_is_counted_for_each_strategy(rows: list[dict[str, Any]]) -> None:
    share = {(row["strategy"], row["arrivals"], row["variation"]): row["useful_token_share"] for row in rows}
    assert {value for (strategy, _, _), value in share.items() if strategy == "continuous"} == {1.0}
    assert share["static", AT_ONCE, 0.0] == 1.0  # all end together: no slot is padding
    assert share["static/padded", AT_ONCE, 0.0] < 1.0  # the prompts differ in length
    assert share["static", AT_ONCE, 1.0] < 0.9
    assert share["static", AT_ONCE, 1.0] == share["dynamic", AT_ONCE, 1.0]  # the queue is never short of requests
    assert share["static/padded", AT_ONCE, 1.0] < share["static", AT_ONCE, 1.0]


def test_every_key_is_documented(rows: list[dict[str, Any]]) -> None:
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert set(rows[0]) | set(PoliciesSettings.__dataclass_fields__) <= documented


def test_only_output_lengths_differ_between_variations() -> None:
    low, same, high = (SMALL.workload(range(10, 50), variation) for variation in (0.2, 0.2, 1.0))
    assert low == same
    assert [one.prompt_ids for one in low.requests] == [one.prompt_ids for one in high.requests]
    assert [one.n_out for one in low.requests] != [one.n_out for one in high.requests]
    times = SMALL.poisson(2.0)
    assert times == sorted(times)
    assert (len(times), times[0]) == (9, 0.0)


def test_invalid_settings_are_refused_by_name() -> None:
    for name, value in [("load", 0.0), ("variations", (-1.0,)), ("arrivals", ("magic",)), ("strategies", ())]:
        with pytest.raises(InvalidParameter) as refusal:
            PoliciesSettings(**{name: value})  # type: ignore[arg-type]
        assert refusal.value.parameter == name
    for text in ("magic", "static/magic", ""):
        with pytest.raises(InvalidParameter, match="strategies"):
            Strategy.parse(text)


def test_the_command(folder: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "a.json", tmp_path / "a.png"
    options = ["--requests=4", "--prompt=5", "--output=4", "--concurrency=2", "--variations=0.5,1", "--max-delay-ms=5"]
    outputs = ["--json", str(figures), "--plot", str(picture)]
    made = CliRunner().invoke(app, ["bench", "policies", "--model", folder, "--device", "cpu", *options, *outputs])
    assert made.exit_code == 0, made.output
    report = json.loads(figures.read_text())
    assert report["settings"]["strategies"] == ["continuous", "dynamic", "static"]
    assert len(report["rows"]) == 2 * 2 * 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    for option in ("--policy=static", "--attention=padded", "--max-batch-requests=4", "--no-prefix-caching"):
        refused = CliRunner().invoke(app, ["bench", "policies", option])
        assert refused.exit_code == 2
