"""The search for settings that keep targets: `chairlift tune`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.targets import parse_classes
from chairlift.options import options_of, read_config_file
from chairlift_lab.load.trace_files import TraceEntry
from chairlift_lab.planning.prediction import ReplicaSettings, simulate_alone
from chairlift_lab.planning.tuning import GRID, RATIO, Judge, Search, grid
from chairlift_lab.planning.what_if import Changes, changed
from chairlift_lab.simulator.outcome import attainment
from chairlift_lab.simulator.step_cost import MeasuredCost
from tests.api.cli_runner import run

COST = MeasuredCost(0.004, 0.0001, 1e-7, 1e-7, ((0, 0.0002),))
CLASSES = ("short=ttft:300,tpot:40", "long=e2e:20000,share:0.5")


def make_entries(count: int = 60, gap: float = 0.05) -> list[TraceEntry]:
    rng = random.Random(1)
    return [TraceEntry(index * gap, rng.randint(5, 120), rng.randint(2, 30)) for index in range(count)]


def make_judge(share: float = 0.9) -> Judge:
    settings = ReplicaSettings(num_blocks=400, slots=16, max_batch_tokens=128)
    return Judge(make_entries(), list(parse_classes(CLASSES).values()), settings, COST, share)


@pytest.mark.parametrize("order", ["fcfs", "slack"])
def test_a_simulation_that_ends_early_gives_the_same_answer(order: str) -> None:
    judge, answers = make_judge(), set()
    for level in range(-100, 200, 30):
        replica = changed(judge.settings, {"order": order}).make(judge.cost)
        classes = attainment(simulate_alone(judge.arrivals(RATIO**level), replica).records)
        expected = all(each["good_share"] >= judge.share for each in classes.values())
        assert judge.keeps({"order": order}, level) is expected
        answers.add(expected)
    assert answers == {True, False}


class TableJudge(Judge):
    """Knows the highest level of all settings."""

    def _simulated(self, changes: Changes, speed: float) -> bool:
        tokens, requests = changes["max_batch_tokens"], changes["max_batch_requests"]
        level = (
            {"slack": 40, "edf": 35}.get(changes["order"], -200) - abs(tokens - 1024) // 64 - abs(requests - 64) // 8
        )
        return speed <= RATIO ** (level + 0.5)


def make_search(start: dict[str, Any] | None = None, **options: Any) -> Search:
    judge = TableJudge([], [], ReplicaSettings(num_blocks=1), COST, 0.99)
    sizes = {"max_batch_tokens": 8192, "max_batch_requests": 256}
    return Search(judge, start or {"order": "fcfs"} | sizes, **options)


def test_the_search_finds_the_best_settings_and_tries_none_twice() -> None:
    search = make_search()
    search.run()
    assert {**search.best} == {"order": "slack", "max_batch_tokens": 1024, "max_batch_requests": 64}
    assert search.level == 40
    tried = [tuple(sorted(trial.changes.items())) for trial in search.trials]
    assert len(set(tried)) == len(tried)
    assert search.trials[0].level == -200 - 7168 // 64 - 192 // 8


def test_options_that_were_given_stay() -> None:
    search = make_search(
        {"order": "edf", "max_batch_tokens": 512, "max_batch_requests": 64}, fixed=frozenset({"order"})
    )
    search.run()
    assert {trial.changes["order"] for trial in search.trials} == {"edf"}
    assert search.best["max_batch_tokens"] == 1024


def test_the_search_ends_in_time() -> None:
    times = iter(range(1000))
    search = make_search(seconds=5, clock=lambda: next(times))
    search.run()
    assert 0 < len(search.trials) <= 5


def test_the_grid_has_sixty_settings_and_each_is_valid() -> None:
    settings = list(grid())
    assert len(settings) == 60 == len({tuple(sorted(each.items())) for each in settings})
    assert set(GRID) == {"strategy", "max_batch_tokens", "max_batch_requests"}
    for each in settings:
        EngineConfig(**each)


def write_trace(path: Path) -> Path:
    lines = [f"{entry.at},{entry.n_in},{entry.n_out}" for entry in make_entries(25)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_what_is_found_is_a_config_file_of_a_server(tmp_path: Path) -> None:
    trace, config, out = write_trace(tmp_path / "t.csv"), tmp_path / "server.yaml", tmp_path / "out.json"
    options = ["--model", "qwen3-0.6b", "--device", "l4", "--trace", str(trace), "--target", "ttft:40,tpot:12"]
    options += ["--max-batch-requests", "32", "--out", str(config), "--json", str(out), "--seconds", "2", "--quiet"]
    outcome = run("tune", *options)
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(out.read_text())["rows"]
    values = read_config_file(config, options_of(EngineConfig))
    assert values == row["settings"]
    assert EngineConfig(**values).max_batch_requests == 32
    assert row["speed"] >= (row["speed_as_is"] or 0)
    assert row["rate"] == pytest.approx(row["speed"] * 25 / make_entries(25)[-1].at)
    assert config.read_text() in outcome.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--target", "ttft:500"), "give recorded traffic"),
        (("--trace", "TRACE"), "no request has targets"),
        (("--trace", "TRACE", "--target", "ttft"), "must look like"),
        (("--trace", "TRACE", "--target", "ttft:5", "--class", "a=ttft:5"), "goes neither with"),
        (("--trace", "TRACE", "--target", "ttft:5", "--copies", "2"), "does not go with tune"),
        (("--trace", "TRACE", "--target", "ttft:5", "--share", "2"), "must be from 0.01 to 1"),
        (("--trace", "TRACE", "--target", "ttft:5", "--out", "/no/such/file"), "cannot write"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments: Sequence[str], problem: str, tmp_path: Path) -> None:
    trace = str(write_trace(tmp_path / "t.csv"))
    outcome = run("tune", *(trace if each == "TRACE" else each for each in arguments))
    assert outcome.exit_code == 2
    assert problem in " ".join(outcome.output.split())


def test_unreachable_targets_are_said(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.csv")
    options = ("--model", "qwen3-0.6b", "--device", "l4", "--target", "ttft:0.001", "--seconds", "1", "--quiet")
    outcome = run("tune", "--trace", str(trace), *options, "--order", "fcfs")
    assert outcome.exit_code == 0
    assert "None of these settings keeps the targets" in outcome.output
