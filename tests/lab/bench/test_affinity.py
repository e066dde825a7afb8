"""The bench of prefix affinity: real fleets beside simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift_lab.bench.affinity import AffinitySettings

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"


@pytest.mark.parametrize("option", ["--groups", "--per-group", "--prefix-tokens", "--rate", "--replicas"])
def test_bad_numbers_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "affinity", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_requests_of_a_group_share_exactly_their_prefix() -> None:
    settings = AffinitySettings(
        groups=3, per_group=4, prefix_tokens=50, own_tokens=5, output_tokens=2, rate=1.0, replicas=2, seed=1
    )
    requests = settings.requests()
    prefixes = [request.prompt_ids[:50] for request in requests]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({request.prompt_ids for request in requests}) == len(settings.times()) == 12
    assert requests == settings.requests()


@pytest.mark.slow
def test_affinity_keeps_the_hit_rate_of_one_replica_as_predicted(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
    from tests.cluster.running_fleet import run_with_own_ray
    from tests.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path / "tiny", positions=1024)
    options = ["--rate", "4", "--per-group", "8", "--kv-memory", "8MiB", "--model", str(folder)]
    run_with_own_ray("bench", "affinity", *options, "--json", str(tmp_path / "out.json"))
    report = json.loads((tmp_path / "out.json").read_text())
    one, affine, turns, hot = report["rows"]
    assert affine["cached_share"] >= 0.95 * one["cached_share"]
    assert turns["cached_share"] < affine["cached_share"]
    assert hot["imbalance"] <= 1.5
    for row in (one, affine, turns):
        assert abs(row["cached_share"] - row["predicted_cached_share"]) <= 0.05
    section = DOCUMENT.read_text().split("## `bench affinity`")[1].split("\n## ")[0]
    for key in (*one, *report["settings"]):
        assert f"`{key}`" in section
