"""`bench claims`: the verdicts follow from the figures, and every claim is measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.bench.attention import AttentionSettings
from chairlift_lab.bench.claims import GROUPS, ClaimsSettings, run_claims
from chairlift_lab.bench.policies import AT_ONCE, POISSON, PoliciesSettings, Strategy
from chairlift_lab.common import verdicts
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.verdicts import Holds
from chairlift_lab.report.options import parse_names
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
        slots=2,
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


def row_of(strategy: str, arrivals: str, variation: float, tokens_per_s: float, useful: float) -> dict[str, Any]:
    figures = {"output_tokens_per_s": tokens_per_s, "useful_token_share": useful}
    return {"strategy": strategy, "arrivals": arrivals, "variation": variation} | figures


def stall(chunk: int | None, worst_gap: float, first_token: float) -> dict[str, Any]:
    return {"chunk": chunk, "worst_gap": worst_gap, "median_gap": 0.1, "first_token": first_token}


def shared(prefix: int, used: int, separate: int, batch: int, separate_batch: int) -> dict[str, int]:
    blocks = {"prefix_blocks": prefix, "shared_blocks": used, "separate_blocks": separate}
    return blocks | {"shared_batch": batch, "separate_batch": separate_batch}


def compute(achieved: float, ceiling: float) -> dict[str, float]:
    return {"share": achieved / ceiling, "achieved_flops": achieved, "ceiling_flops": ceiling}


def generation(tokens: int, cached: float, anew: float) -> dict[str, float]:
    counts = {"tokens": tokens, "cached_tokens": tokens, "recompute_tokens": tokens * (tokens + 1) // 2}
    return counts | {"cached_seconds": cached, "recompute_seconds": anew}


def tiles(
    tokens: int, tiled: float, full: float | None, tiled_bytes: int | None, full_bytes: int | None
) -> dict[str, Any]:
    seconds = {"tokens": tokens, "tiled_seconds": tiled, "full_seconds": full}
    return seconds | {"tiled_bytes": tiled_bytes, "full_bytes": full_bytes}


def test_verdicts_about_compute_and_batching() -> None:
    assert verdicts.judge_compute_share(compute(5e9, 100e9)).holds is Holds.YES
    assert verdicts.judge_compute_share(compute(20e9, 100e9)).holds is Holds.NO
    assert verdicts.judge_batching({1: 10.0, 8: 70.0}).holds is Holds.YES
    assert verdicts.judge_batching({1: 10.0, 8: 30.0}).holds is Holds.PARTLY
    found = verdicts.judge_batching({1: 10.0, 8: 20.0, 64: 15.0})
    assert found.holds is Holds.NO
    assert found.figures["ratio"] == pytest.approx(2.0)


def test_verdicts_about_policies() -> None:
    rows = [
        row_of("continuous", AT_ONCE, 1.0, 120.0, 1.0),
        row_of("static/padded", AT_ONCE, 1.0, 10.0, 0.4),
        row_of("static", AT_ONCE, 1.0, 40.0, 0.6),
        row_of("continuous", POISSON, 1.0, 100.0, 1.0),
        row_of("dynamic", POISSON, 1.0, 80.0, 0.7),
        row_of("static", POISSON, 1.0, 60.0, 0.6),
    ]
    static = verdicts.judge_continuous_vs_static(rows)
    assert static.holds is Holds.YES
    assert static.figures == {"ratio_at_1": pytest.approx(12.0)}
    dynamic = verdicts.judge_continuous_vs_dynamic(rows)
    assert dynamic.holds is Holds.YES
    assert "+25%" in dynamic.measured
    assert verdicts.judge_useful_tokens(rows).holds is Holds.YES
    slower = [row_of("continuous", AT_ONCE, 1.0, 11.0, 1.0), *rows[1:]]
    assert verdicts.judge_continuous_vs_static(slower).holds is Holds.NO


def test_verdict_about_chunking() -> None:
    whole, large, small = (
        stall(None, 5.0, 5.0),
        stall(4096, 2.0, 6.0),
        stall(128, 0.1, 9.0),
    )
    found = verdicts.judge_chunking([whole, large, small], 10_000)
    assert found.holds is Holds.YES
    assert "50x less" in found.measured
    hasty = verdicts.judge_chunking([whole, large, small | {"first_token": 4.0}], 10_000)
    assert hasty.holds is Holds.PARTLY
    assert verdicts.judge_chunking([whole, large, small | {"worst_gap": 4.0}], 10_000).holds is Holds.NO


def test_verdicts_about_counted_figures() -> None:
    exact = {"padded": 693, "ragged": 0}
    assert verdicts.judge_joining_padding(exact, 100, 8).holds is Holds.YES
    assert verdicts.judge_joining_padding({"padded": 692, "ragged": 0}, 100, 8).holds is Holds.NO
    assert verdicts.judge_shared_prefix(shared(62, 70, 194, 12, 3)).holds is Holds.YES
    assert verdicts.judge_shared_prefix(shared(62, 71, 194, 12, 3)).holds is Holds.NO
    assert verdicts.judge_kv_waste({"paged": 0.02, "contiguous": 0.8}).holds is Holds.YES
    assert verdicts.judge_kv_waste({"paged": 0.02, "contiguous": 0.3}).holds is Holds.PARTLY
    assert verdicts.judge_kv_waste({"paged": 0.1, "contiguous": 0.8}).holds is Holds.NO


def test_verdicts_about_attention() -> None:
    figures = ("kv_heads", "bytes_per_token", "decode_seconds", "largest_batch")
    heads = ((8, 400, 4.0, 10), (2, 100, 1.0, 40), (1, 1, 1, 1))
    sharing = [dict(zip(figures, each, strict=True)) for each in heads]
    assert verdicts.judge_head_sharing(sharing).holds is Holds.YES
    tiling = [tiles(n, n / 10, n / 4, 1000 * n, n * n) for n in (1000, 2000, 4000)]
    time, memory = verdicts.judge_tiling(tiling)
    assert (time.holds, memory.holds) == (Holds.YES, Holds.YES)
    assert memory.figures == {"tiled_growth": pytest.approx(1.0), "full_growth": pytest.approx(2.0)}
    unmeasured = [tiles(1000, 1.0, 1.5, None, None), tiles(2000, 1.0, None, None, None)]
    (time,) = verdicts.judge_tiling(unmeasured)
    assert time.holds is Holds.NO
    modes = [{"seconds": {"ragged": 1.0, "bursted": 3.0, "padded": 0.9}}]
    assert verdicts.judge_modes(modes).holds is Holds.YES
    cache = [generation(n, n * 0.1, n * n * 0.01) for n in (10, 20, 40, 80)]
    assert verdicts.judge_cache(cache).holds is Holds.YES
    flat = [generation(n, n * 0.1, n * 0.2) for n in (10, 20, 40, 80)]
    assert verdicts.judge_cache(flat).holds is Holds.NO


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
