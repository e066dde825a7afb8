"""The verdicts of `chairlift bench claims`: published claims (verdicts.json) beside the figures that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chairlift_lab.bench.policies import AT_ONCE, POISSON
from chairlift_lab.common.timing import growth

Rows = Sequence[Mapping[str, Any]]

# The texts of each claim; what was measured is filled into them.
CLAIMS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


class Holds(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"

    @classmethod
    def judge(cls, whole: bool, in_part: bool = False) -> Holds:
        return cls.YES if whole else cls.PARTLY if in_part else cls.NO


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """One claim and what was measured."""

    claim: str
    source: str
    measured: str
    holds: Holds
    why: str  # the explanation of the figure, above all where it differs from the claim
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, claim: str, holds: Holds, figures: dict[str, float], **shown: Any) -> ClaimVerdict:
        """The verdict on a claim of CLAIMS, whose texts show `figures` and what else is `shown`."""
        texts = {part: text.format(**figures | shown) for part, text in CLAIMS[claim].items()}
        return cls(holds=holds, figures=figures, **texts)

    def row(self) -> dict[str, Any]:
        return {"name": self.claim} | asdict(self) | {"holds": str(self.holds)}


def judge_compute_share(figures: dict[str, float]) -> ClaimVerdict:
    achieved, ceiling = (figures[f"{name}_flops"] / 1e9 for name in ("achieved", "ceiling"))
    holds = Holds.judge(figures["share"] < 0.1)
    return ClaimVerdict.of("compute share", holds, figures, achieved=achieved, ceiling=ceiling)


def judge_batching(rates: Mapping[int, float]) -> ClaimVerdict:
    best = max(rates, key=lambda requests: rates[requests])
    ratio = rates[best] / next(iter(rates.values()))
    figures = {f"tokens_per_s_{requests}": rate for requests, rate in rates.items()} | {"ratio": ratio}
    shown = ", ".join(f"{rate:,.0f} ({requests})" for requests, rate in rates.items())
    return ClaimVerdict.of("batching", Holds.judge(ratio >= 5, ratio >= 2.5), figures, best=best, rates=shown)


def judge_continuous_vs_dynamic(rows: Rows) -> ClaimVerdict:
    gains = _gains(rows, POISSON, "dynamic")
    best = max(gains.values())
    figures = {f"gain_at_{variation:g}": gain - 1 for variation, gain in gains.items()}
    shown = ", ".join(f"{gain - 1:+.0%} at variation {variation:g}" for variation, gain in gains.items())
    return ClaimVerdict.of("continuous vs dynamic", Holds.judge(best >= 1.2, best > 1.05), figures, gains=shown)


def judge_continuous_vs_static(rows: Rows) -> ClaimVerdict:
    classic = "static/padded" if any(row["strategy"] == "static/padded" for row in rows) else "static"
    gains = _gains(rows, AT_ONCE, classic)
    best = max(gains.values())
    worst = min(_find(rows, AT_ONCE, classic, variation)["useful_token_share"] for variation in gains)
    figures = {f"ratio_at_{variation:g}": gain for variation, gain in gains.items()}
    shown = ", ".join(f"{gain:.1f}x at variation {variation:g}" for variation, gain in gains.items())
    holds = Holds.judge(best >= 10, best >= 2)
    return ClaimVerdict.of("continuous vs static", holds, figures, gains=shown, classic=classic, worst=worst)


def judge_useful_tokens(rows: Rows) -> ClaimVerdict:
    static = [row["useful_token_share"] for row in rows if row["strategy"].startswith("static")]
    continuous = min(row["useful_token_share"] for row in rows if row["strategy"] == "continuous")
    figures = {"static_least": min(static), "static_most": max(static), "continuous": continuous}
    holds = Holds.judge(continuous >= 0.8 and min(static) <= 0.7 and max(static) >= 0.5)
    return ClaimVerdict.of("useful tokens", holds, figures)


def judge_joining_padding(padding: dict[str, int], prompt: int, batch: int) -> ClaimVerdict:
    expected = (prompt - 1) * (batch - 1)
    holds = Holds.judge(padding["padded"] == expected and padding["ragged"] == 0)
    figures: dict[str, float] = {f"padding_{mode}": count for mode, count in padding.items()}
    counts = ", ".join(f"{count} {mode}" for mode, count in padding.items())
    shown = {"prompt": prompt, "batch": batch, "expected": expected, "counts": counts}
    return ClaimVerdict.of("joining padding", holds, figures, **shown)


def _gains(rows: Rows, arrivals: str, other: str) -> dict[float, float]:
    """By length variation: how much more continuous batching got done than `other`."""
    speeds = {
        variation: [_find(rows, arrivals, name, variation)["output_tokens_per_s"] for name in ("continuous", other)]
        for variation in sorted({row["variation"] for row in rows})
    }
    return {variation: continuous / slower for variation, (continuous, slower) in speeds.items()}


def _find(rows: Rows, arrivals: str, strategy: str, variation: float) -> Mapping[str, Any]:
    wanted = (arrivals, strategy, variation)
    return next(row for row in rows if (row["arrivals"], row["strategy"], row["variation"]) == wanted)


def judge_chunking(rows: Rows, prompt: int) -> ClaimVerdict:
    whole = next(row for row in rows if row["chunk"] is None)
    chunked = {row["chunk"]: row for row in rows if row["chunk"] is not None}
    least, most = min(chunked), max(chunked)
    shorter = whole["worst_gap"] / chunked[least]["worst_gap"]
    longer = chunked[least]["first_token"] / whole["first_token"]
    gaps = {f"whole: {prompt:,} tokens": whole["worst_gap"]}
    gaps |= {f"{chunk:,}": row["worst_gap"] for chunk, row in sorted(chunked.items(), reverse=True)}
    return ClaimVerdict.of(
        "chunking",
        Holds.judge(shorter >= 4 and longer >= 1, shorter >= 4),
        {f"{key}_{row['chunk'] or 'whole'}": row[key] for key in ("worst_gap", "first_token") for row in rows},
        gaps=", ".join(f"{gap * 1e3:,.0f} ({name})" for name, gap in gaps.items()),
        least=least,
        most=most,
        shorter=shorter,
        longer=longer,
        whole=whole["first_token"],
        large=chunked[most]["first_token"],
        small=chunked[least]["first_token"],
    )


def judge_shared_prefix(figures: dict[str, int]) -> ClaimVerdict:
    saved = figures["separate_blocks"] - figures["shared_blocks"]
    holds = Holds.judge(saved >= 2 * figures["prefix_blocks"] and figures["shared_batch"] > figures["separate_batch"])
    kept: dict[str, float] = {
        name: figures[name] for name in ("shared_blocks", "separate_blocks", "shared_batch", "separate_batch")
    }
    return ClaimVerdict.of("shared prefix", holds, kept, saved=saved, prefix_blocks=figures["prefix_blocks"])


def judge_head_sharing(rows: Rows) -> ClaimVerdict:
    mha, gqa, _ = rows
    figures = {
        "smaller": mha["bytes_per_token"] / gqa["bytes_per_token"],
        "batch": gqa["largest_batch"] / mha["largest_batch"],
        "faster": mha["decode_seconds"] / gqa["decode_seconds"],
    }
    holds = Holds.judge(figures["smaller"] >= 4 and figures["batch"] >= 3.9)
    return ClaimVerdict.of("head sharing", holds, figures, group=mha["kv_heads"] // gqa["kv_heads"])


def judge_kv_waste(figures: dict[str, float]) -> ClaimVerdict:
    contiguous, paged = figures["contiguous"], figures["paged"]
    return ClaimVerdict.of("KV waste", Holds.judge(contiguous >= 0.6 and paged < 0.04, paged < 0.04), figures)


def judge_tiling(rows: Rows) -> list[ClaimVerdict]:
    ratios = {
        row["tokens"]: row["full_seconds"] / row["tiled_seconds"] for row in rows if row["full_seconds"] is not None
    }
    longest, least, most = max(ratios), min(ratios.values()), max(ratios.values())
    time = ClaimVerdict.of(
        "tiling, time",
        Holds.judge(ratios[longest] >= 2, most >= 2),
        {f"ratio_at_{tokens}": ratio for tokens, ratio in ratios.items()},
        ratio=ratios[longest],
        longest=longest,
        least=least,
        most=most,
        shortest=min(ratios),
    )
    memory = [row for row in rows if row["full_bytes"] and row["tiled_bytes"]]
    if len(memory) < 2:
        return [time]
    tiled, full = (_growth(memory, f"{name}_bytes") for name in ("tiled", "full"))
    mib = {name: memory[-1][f"{name}_bytes"] / 2**20 for name in ("tiled", "full")}
    holds, figures = Holds.judge(tiled < 1.3 and full > 1.7), {"tiled_growth": tiled, "full_growth": full}
    return [time, ClaimVerdict.of("tiling, memory", holds, figures, tokens=memory[-1]["tokens"], **mib)]


def judge_modes(rows: Rows) -> ClaimVerdict:
    reference, *modes = rows[0]["seconds"]  # The first is what the engine itself would choose.
    ratios = {mode: [row["seconds"][mode] / row["seconds"][reference] for row in rows] for mode in modes}
    spans = {mode: {"least": min(times), "most": max(times)} for mode, times in ratios.items()}
    holds = Holds.judge(spans["bursted"]["least"] > 1, spans["bursted"]["most"] > 1)
    figures = {f"{mode}_{end}": value for mode, span in spans.items() for end, value in span.items()}
    times = "; ".join(f"{mode} takes {s['least']:.1f}x to {s['most']:.1f}x as long" for mode, s in spans.items())
    return ClaimVerdict.of("modes", holds, figures, times=times, reference=reference)


def judge_cache(rows: Rows) -> ClaimVerdict:
    tail, last = rows[-3:], rows[-1]  # Short texts cost what starting a step costs.
    kept, anew = _growth(rows, "cached_seconds"), _growth(tail, "recompute_seconds")
    ratio = last["recompute_seconds"] / last["cached_seconds"]
    figures = {"kept_growth": kept, "anew_growth": anew, "ratio": ratio}
    holds = Holds.judge(kept < 1.2 and anew > 1.7, kept < 1.2 and anew > 1.3)
    return ClaimVerdict.of("cache", holds, figures, least=tail[0]["tokens"], **last)


def _growth(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return growth(*zip(*((row["tokens"], row[key]) for row in rows), strict=True))


_COLOURS = {"yes": "green", "partly": "yellow", "no": "red"}


@dataclass(frozen=True, slots=True)
class ClaimsTable:
    """The claims with their sources, the measurement and the verdict."""

    verdicts: Sequence[ClaimVerdict]

    def show(self) -> None:
        table = Table(title="Published claims", title_justify="left", box=SIMPLE_HEAD, show_lines=True)
        for heading, ratio in (("Claim", 3), ("Source", 2), ("Measured here", 4), ("Holds?", 1)):
            table.add_column(heading, ratio=ratio)
        for verdict in self.verdicts:
            colour = _COLOURS[verdict.holds]
            why = "" if verdict.holds == "yes" else f"\n[dim]{verdict.why}[/dim]"
            holds = f"[{colour}]{verdict.holds}[/{colour}]"
            table.add_row(verdict.claim, verdict.source, verdict.measured + why, holds)
        Console().print(table)
