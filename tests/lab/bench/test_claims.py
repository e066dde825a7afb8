"""`bench claims`: the verdicts follow from the figures, and every claim is measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench import claims
from chairlift_lab.bench.attention import AttentionSettings, ModesPoint, RecomputePoint, SharingPoint, TilingPoint
from chairlift_lab.bench.claims import (
    GROUPS,
    BatchSizePoint,
    ClaimsSettings,
    ComputeShare,
    Holds,
    KVWaste,
    SharedPrefix,
    StallPoint,
    run_claims,
)
from chairlift_lab.bench.policies import AT_ONCE, POISSON, PoliciesSettings, PolicyPoint, Strategy
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.measure import EngineFigures, Measurement
from chairlift_lab.report.lists import parse_names
from tests.tiny import write_tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "bench-json.md"
SMALL = ClaimsSettings(
    batch_sizes=(1, 2),
    policies=PoliciesSettings(
        strategies=[Strategy.parse(text) for text in ("continuous", "dynamic", "static", "static/padded")],
        variations=(1.0,),
        requests=4,
        prompt=5,
        output=4,
        seats=2,
        max_delay_ms=5.0,
    ),
    attention=AttentionSettings(
        heads=2,
        kv_heads=1,
        head_dim=16,
        batches=(2,),
        variations=(1.0,),
        context=16,
        prompt=8,
        tiling_sizes=(32, 64),
        sharing_heads=4,
        sharing_batch=1,
        cache_sizes=(2, 4),
    ),
    chunks=(8, 16),
    chunked_prompt=64,
    waste_requests=1,
    shared_prefix=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def _measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift_lab.common.timing.best_seconds.__kwdefaults__", {"least": 0.0, "repeats": 1})


def point(strategy: str, arrivals: str, variation: float, tokens_per_s: float, useful: float) -> PolicyPoint:
    inside = EngineFigures(1, 1.0, 0.0, 0, 1, 1, useful, 0)
    seconds = 10 / tokens_per_s
    measured = Measurement(seconds, 1, [[seconds] * 10], inside)
    return PolicyPoint(Strategy.parse(strategy), arrivals, variation, None, measured)


def test_verdicts_about_compute_and_batching() -> None:
    assert claims.judge_compute_share(ComputeShare(5e9, 100e9)).holds is Holds.YES
    assert claims.judge_compute_share(ComputeShare(20e9, 100e9)).holds is Holds.NO
    assert claims.judge_batching([BatchSizePoint(1, 10.0), BatchSizePoint(8, 70.0)]).holds is Holds.YES
    assert claims.judge_batching([BatchSizePoint(1, 10.0), BatchSizePoint(8, 30.0)]).holds is Holds.PARTLY
    found = claims.judge_batching([BatchSizePoint(1, 10.0), BatchSizePoint(8, 20.0), BatchSizePoint(64, 15.0)])
    assert found.holds is Holds.NO
    assert found.figures["ratio"] == pytest.approx(2.0)


def test_verdicts_about_policies() -> None:
    points = [
        point("continuous", AT_ONCE, 1.0, 120.0, 1.0),
        point("static/padded", AT_ONCE, 1.0, 10.0, 0.4),
        point("static", AT_ONCE, 1.0, 40.0, 0.6),
        point("continuous", POISSON, 1.0, 100.0, 1.0),
        point("dynamic", POISSON, 1.0, 80.0, 0.7),
        point("static", POISSON, 1.0, 60.0, 0.6),
    ]
    static = claims.judge_continuous_vs_static(points)
    assert static.holds is Holds.YES
    assert static.figures == {"ratio_at_1": pytest.approx(12.0)}
    dynamic = claims.judge_continuous_vs_dynamic(points)
    assert dynamic.holds is Holds.YES
    assert "+25%" in dynamic.measured
    assert claims.judge_useful_tokens(points).holds is Holds.YES
    slower = [point("continuous", AT_ONCE, 1.0, 11.0, 1.0), *points[1:]]
    assert claims.judge_continuous_vs_static(slower).holds is Holds.NO


def test_verdict_about_chunking() -> None:
    whole, large, small = (
        StallPoint(None, 5.0, 0.1, 5.0),
        StallPoint(4096, 2.0, 0.1, 6.0),
        StallPoint(128, 0.1, 0.1, 9.0),
    )
    found = claims.judge_chunking([whole, large, small], 10_000)
    assert found.holds is Holds.YES
    assert "50x less" in found.measured
    hasty = claims.judge_chunking([whole, large, replace(small, first_token=4.0)], 10_000)
    assert hasty.holds is Holds.PARTLY
    assert claims.judge_chunking([whole, large, replace(small, worst_gap=4.0)], 10_000).holds is Holds.NO


def test_verdicts_about_counted_figures() -> None:
    exact = {"padded": 693, "ragged": 0}
    assert claims.judge_joining_padding(exact, 100, 8).holds is Holds.YES
    assert claims.judge_joining_padding({"padded": 692, "ragged": 0}, 100, 8).holds is Holds.NO
    assert claims.judge_shared_prefix(SharedPrefix(62, 70, 194, 12, 3)).holds is Holds.YES
    assert claims.judge_shared_prefix(SharedPrefix(62, 71, 194, 12, 3)).holds is Holds.NO
    assert claims.judge_kv_waste(KVWaste(0.02, 0.8)).holds is Holds.YES
    assert claims.judge_kv_waste(KVWaste(0.02, 0.3)).holds is Holds.PARTLY
    assert claims.judge_kv_waste(KVWaste(0.1, 0.8)).holds is Holds.NO


def test_verdicts_about_attention() -> None:
    sharing = [SharingPoint("MHA", 8, 400, 4.0, 10), SharingPoint("GQA", 2, 100, 1.0, 40), SharingPoint("", 1, 1, 1, 1)]
    assert claims.judge_head_sharing(sharing).holds is Holds.YES
    tiling = [TilingPoint(n, n / 10, n / 4, 1000 * n, n * n) for n in (1000, 2000, 4000)]
    time, memory = claims.judge_tiling(tiling)
    assert (time.holds, memory.holds) == (Holds.YES, Holds.YES)
    assert memory.figures == {"tiled_growth": pytest.approx(1.0), "full_growth": pytest.approx(2.0)}
    unmeasured = [TilingPoint(1000, 1.0, 1.5, None, None), TilingPoint(2000, 1.0, None, None, None)]
    (time,) = claims.judge_tiling(unmeasured)
    assert time.holds is Holds.NO
    modes = [ModesPoint("decode", 4, 0.0, 4, 0, 9, 9, {"ragged": 1.0, "bursted": 3.0, "padded": 0.9})]
    assert claims.judge_modes(modes).holds is Holds.YES
    cache = [RecomputePoint(n, n * 0.1, n * n * 0.01, n, n * (n + 1) // 2) for n in (10, 20, 40, 80)]
    assert claims.judge_cache(cache).holds is Holds.YES
    flat = [RecomputePoint(n, n * 0.1, n * 0.2, n, n * (n + 1) // 2) for n in (10, 20, 40, 80)]
    assert claims.judge_cache(flat).holds is Holds.NO


def test_every_claim_is_measured_and_every_key_documented(folder: str) -> None:
    maker = EngineMaker.load(folder, {"device": "cpu"})
    results = run_claims(maker, SMALL)
    # Three about policies, and two about tiling where the system tells how much memory was used.
    assert len(results.verdicts) in (len(GROUPS) + 2, len(GROUPS) + 3)
    for verdict in results.verdicts:
        assert verdict.claim
        assert verdict.source
        assert verdict.measured
        assert verdict.why
        assert verdict.figures
    documented = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert set(results.verdicts[0].row()) <= documented
    counted = {verdict.claim.split()[0]: verdict for verdict in results.verdicts}
    assert counted["A"].figures == {"padding_padded": 693, "padding_ragged": 0, "padding_bursted": 0}
    assert counted["Three"].holds is Holds.YES


def test_the_command(folder: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "a.json", tmp_path / "a.png"
    asked = ["bench", "claims", "--model", folder, "--device", "cpu", "--claims", "padding,tiling", "--sizes", "32,64"]
    made = CliRunner().invoke(app, [*asked, "--json", str(figures), "--plot", str(picture)], env={"COLUMNS": "160"})
    assert made.exit_code == 0, made.output
    assert "693 padded, 0 ragged" in made.output
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) >= 2
    assert all(row["holds"] in ("yes", "partly", "no") for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_unknown_claims_are_refused() -> None:
    for text in ("magic", "cache,cache", ","):
        with pytest.raises(InvalidParameter, match="claims"):
            parse_names("claims", text, GROUPS)
