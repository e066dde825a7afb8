"""The bench of the dashboard: its arithmetic, and one short run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench.dashboard.page_speed import full_batches
from chairlift_lab.bench.dashboard.plot import plot_cost
from chairlift_lab.bench.dashboard.run import DashboardCost, DashboardWindow, _turns
from tests.dashboard.recorded import read_back
from tests.tiny import write_tiny_checkpoint


def window(is_open: bool, tokens: int) -> DashboardWindow:
    return DashboardWindow(is_open, 2.0, tokens, engine_cpu=1.0, front_end_cpu=0.5)


def test_each_open_window_is_compared_with_its_neighbour(tmp_path: Path) -> None:
    # The machine slows down by half in between, which pairs cancel out.
    cost = DashboardCost(
        [window(False, 100), window(True, 99), window(True, 48), window(False, 50)], 4000, [7, 9], [1, 2]
    )
    assert [one.is_open for one in cost.windows] == list(_turns(2))
    assert cost.ratio == pytest.approx((0.99 + 0.96) / 2)
    assert cost.ratio_error == pytest.approx(0.015)
    closed, opened = cost.rows()
    assert (closed["output_tokens_per_s"], closed["ratio"]) == (37.5, 1.0)
    assert (opened["engine_cpu_share"], opened["stream_bytes_per_s"]) == (0.5, 1000.0)
    plot_cost(tmp_path / "cost.png", cost, "here")
    assert (tmp_path / "cost.png").stat().st_size > 1000


def test_batches_of_the_drawn_run_are_full() -> None:
    steps, _ = read_back(list(full_batches(61, 8)))
    assert len(steps) == 61
    assert sum(map(len, steps[10:])) > 0.9 * 8 * 51


@pytest.mark.slow
def test_measures_a_server_with_the_page_open_and_closed(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny")
    out = tmp_path / "cost.json"
    options = ["--streams", "4", "--pairs", "1", "--seconds", "1", "--output-len", "16:64", "--kv-memory", "4MiB", "-q"]
    done = CliRunner().invoke(app, ["bench", "dashboard", "--model", str(model), *options, "--json", str(out)])
    assert done.exit_code == 0, done.output
    closed, opened = json.loads(out.read_text())["rows"]
    assert closed["output_tokens_per_s"] > 0
    assert opened["stream_bytes_per_s"] > 100
    assert opened["engine_memory_first_bytes"] > opened["front_end_memory_first_bytes"] > 0
    assert opened["engine_cpu_ms_per_token"] > 0
