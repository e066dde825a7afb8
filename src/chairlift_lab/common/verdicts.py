"""The verdicts of `chairlift bench claims`: each published claim beside the figures that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chairlift_lab.bench.policies import AT_ONCE, POISSON
from chairlift_lab.common.timing import growth

Rows = Sequence[Mapping[str, Any]]


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

    def row(self) -> dict[str, Any]:
        return {"name": self.claim} | asdict(self) | {"holds": str(self.holds)}


GUIDES = "guides to LLM serving"
ANYSCALE = "Anyscale, continuous batching, 2023"
HUGGING_FACE = "Hugging Face, continuous batching from first principles, 2025"
PAGED_ATTENTION = "PagedAttention (vLLM), 2023"
FLASH_ATTENTION = "FlashAttention, 2022"
GQA = "Ainslie et al., GQA, 2023"
SARATHI = "Sarathi-Serve, 2024"


def judge_compute_share(figures: dict[str, float]) -> ClaimVerdict:
    achieved, ceiling = (figures[f"{name}_flops"] / 1e9 for name in ("achieved", "ceiling"))
    return ClaimVerdict(
        "One request uses less than 10% of the compute",
        GUIDES,
        f"{figures['share']:.1%}: {achieved:,.1f} of {ceiling:,.1f} GFLOP/s",
        Holds.judge(figures["share"] < 0.1),
        "decoding one token reads every weight for two operations on it, so memory sets the pace",
        figures,
    )


def judge_batching(rates: Mapping[int, float]) -> ClaimVerdict:
    best = max(rates, key=lambda requests: rates[requests])
    ratio = rates[best] / next(iter(rates.values()))
    return ClaimVerdict(
        "Batching gets 5–10x more done than one request at a time",
        GUIDES,
        f"{ratio:.1f}x with {best} requests: "
        + ", ".join(f"{rate:,.0f} ({requests})" for requests, rate in rates.items())
        + " tokens/s (requests)",
        Holds.judge(ratio >= 5, ratio >= 2.5),
        "it grows until arithmetic, not memory, sets the pace; where that is depends on the machine and the model",
        {f"tokens_per_s_{requests}": rate for requests, rate in rates.items()} | {"ratio": ratio},
    )


def judge_continuous_vs_dynamic(rows: Rows) -> ClaimVerdict:
    gains = _gains(rows, POISSON, "dynamic")
    best = max(gains.values())
    return ClaimVerdict(
        "Continuous batching gets 20–30% more done than dynamic batching",
        GUIDES,
        _list_by_variation(gains, "{:+.0%}", shift=-1) + ", requests one by one",
        Holds.judge(best >= 1.2, best > 1.05),
        "requests come at a given rate, so the gain is bounded by how far dynamic batching falls behind that rate; "
        "it grows with the load and with the variation of lengths",
        {f"gain_at_{variation:g}": gain - 1 for variation, gain in gains.items()},
    )


def judge_continuous_vs_static(rows: Rows) -> ClaimVerdict:
    classic = "static/padded" if any(row["strategy"] == "static/padded" for row in rows) else "static"
    gains = _gains(rows, AT_ONCE, classic)
    best = max(gains.values())
    worst_share = min(_find(rows, AT_ONCE, classic, variation)["useful_token_share"] for variation in gains)
    return ClaimVerdict(
        "Continuous batching gets up to 10–20x more done than static batching where lengths vary much",
        ANYSCALE,
        _list_by_variation(gains, "{:.1f}x", shift=0) + f", against {classic}",
        Holds.judge(best >= 10, best >= 2),
        f"with the same engine on both sides, all that static batching can lose is its padding: at worst "
        f"{worst_share:.0%} of its tokens were useful here. Larger figures also compare engines and memory management",
        {f"ratio_at_{variation:g}": gain for variation, gain in gains.items()},
    )


def judge_useful_tokens(rows: Rows) -> ClaimVerdict:
    static = [row["useful_token_share"] for row in rows if row["strategy"].startswith("static")]
    continuous = [row["useful_token_share"] for row in rows if row["strategy"] == "continuous"]
    low, high = min(static), max(static)
    return ClaimVerdict(
        "Useful tokens: 50–70% with static, 80–95% with continuous batching",
        GUIDES,
        f"static {low:.0%} to {high:.0%}, continuous {min(continuous):.0%}",
        Holds.judge(min(continuous) >= 0.8 and low <= 0.7 and high >= 0.5),
        "static depends on how much lengths vary; a ragged batch has no padding at all",
        {"static_least": low, "static_most": high, "continuous": min(continuous)},
    )


def judge_joining_padding(padding: dict[str, int], prompt: int, batch: int) -> ClaimVerdict:
    expected = (prompt - 1) * (batch - 1)
    return ClaimVerdict(
        f"A prompt of {prompt} tokens that joins a padded batch of {batch} adds (n−1)(B−1) = {expected} padding tokens",
        HUGGING_FACE,
        ", ".join(f"{count} {mode}" for mode, count in padding.items()),
        Holds.judge(padding["padded"] == expected and padding["ragged"] == 0),
        "counted by the engine in the very step",
        {f"padding_{mode}": count for mode, count in padding.items()},
    )


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


def _list_by_variation(values: dict[float, float], form: str, *, shift: float) -> str:
    return ", ".join(f"{form.format(value + shift)} at variation {key:g}" for key, value in values.items())


def judge_chunking(rows: Rows, prompt: int) -> ClaimVerdict:
    whole = next(row for row in rows if row["chunk"] is None)
    chunked = {row["chunk"]: row for row in rows if row["chunk"] is not None}
    least, most = min(chunked), max(chunked)
    shorter = whole["worst_gap"] / chunked[least]["worst_gap"]
    longer = chunked[least]["first_token"] / whole["first_token"]
    gaps = {f"whole: {prompt:,} tokens": whole["worst_gap"]}
    gaps |= {f"{chunk:,}": row["worst_gap"] for chunk, row in sorted(chunked.items(), reverse=True)}
    return ClaimVerdict(
        "Chunked prefill keeps running requests going while a long prompt arrives; small chunks delay its first token",
        SARATHI,
        "worst gap between tokens "
        + ", ".join(f"{gap * 1e3:,.0f} ({name})" for name, gap in gaps.items())
        + f" ms (chunk): {shorter:.0f}x less; time to first token {whole['first_token']:.1f} s whole, "
        f"{chunked[most]['first_token']:.1f} s in chunks of {most:,}, {chunked[least]['first_token']:.1f} s of {least}",
        Holds.judge(shorter >= 4 and longer >= 1, shorter >= 4),
        f"a chunk is a step for all, and a step costs something whatever its size: chunks of {least} take "
        f"{longer:.2f}x as long to the first token. A small random model, others generating",
        {f"{key}_{row['chunk'] or 'whole'}": row[key] for key in ("worst_gap", "first_token") for row in rows},
    )


def judge_shared_prefix(figures: dict[str, int]) -> ClaimVerdict:
    prefix, shared, separate = (figures[f"{name}_blocks"] for name in ("prefix", "shared", "separate"))
    batch, small_batch = figures["shared_batch"], figures["separate_batch"]
    saved = separate - shared
    return ClaimVerdict(
        "Three requests with the same 1,000 tokens hold them once, and a larger batch fits",
        PAGED_ATTENTION,
        f"{shared} blocks instead of {separate} ({saved} saved; 2 × {prefix} are the common tokens); "
        f"{batch} requests at a time instead of {small_batch}",
        Holds.judge(saved >= 2 * prefix and batch > small_batch),
        "counted by the block pool",
        {name: figures[name] for name in ("shared_blocks", "separate_blocks", "shared_batch", "separate_batch")},
    )


def judge_head_sharing(rows: Rows) -> ClaimVerdict:
    mha, gqa, _ = rows
    smaller = mha["bytes_per_token"] / gqa["bytes_per_token"]
    batch = gqa["largest_batch"] / mha["largest_batch"]
    faster = mha["decode_seconds"] / gqa["decode_seconds"]
    group = mha["kv_heads"] // gqa["kv_heads"]
    return ClaimVerdict(
        f"GQA with {group} query heads per KV head: a 4x smaller KV cache, about 4x the batch",
        GQA,
        f"{smaller:.1f}x smaller, {batch:.1f}x the batch in the same memory; decode attention {faster:.1f}x faster",
        Holds.judge(smaller >= 4 and batch >= 3.9),
        "the batch is what the memory formula allows; decoding gains as far as reading keys and values sets its pace",
        {"smaller": smaller, "batch": batch, "faster": faster},
    )


def judge_kv_waste(figures: dict[str, float]) -> ClaimVerdict:
    contiguous, paged = figures["contiguous"], figures["paged"]
    return ClaimVerdict(
        "Reserving the longest sequence wastes 60–80% of KV memory, pages less than 4%",
        PAGED_ATTENTION,
        f"{contiguous:.0%} reserved, {paged:.1%} paged",
        Holds.judge(contiguous >= 0.6 and paged < 0.04, paged < 0.04),
        "averaged over all steps of a workload with the mean lengths of recorded chats; longer limits waste more",
        figures,
    )


def judge_tiling(rows: Rows) -> list[ClaimVerdict]:
    ratios = {
        row["tokens"]: row["full_seconds"] / row["tiled_seconds"] for row in rows if row["full_seconds"] is not None
    }
    longest = max(ratios)
    least, most = min(ratios.values()), max(ratios.values())
    time = ClaimVerdict(
        "FlashAttention is 2–4x faster than attention with the score matrix in memory",
        FLASH_ATTENTION,
        f"{ratios[longest]:.1f}x at {longest:,} tokens ({least:.1f}x to {most:.1f}x from {min(ratios):,} tokens on)",
        Holds.judge(ratios[longest] >= 2, most >= 2),
        "torch's tiled kernel also skips the half of the scores that causal attention never looks at",
        {f"ratio_at_{tokens}": ratio for tokens, ratio in ratios.items()},
    )
    memory = [row for row in rows if row["full_bytes"] and row["tiled_bytes"]]
    if len(memory) < 2:
        return [time]
    full, tiled = (
        growth(*([row[key] for row in memory] for key in ("tokens", f"{name}_bytes"))) for name in ("full", "tiled")
    )
    last = memory[-1]
    return [
        time,
        ClaimVerdict(
            "FlashAttention needs memory of order N, the score matrix of order N²",
            FLASH_ATTENTION,
            f"N^{tiled:.2f} and N^{full:.2f}; at {last['tokens']:,} tokens {last['tiled_bytes'] / 2**20:,.0f} and "
            f"{last['full_bytes'] / 2**20:,.0f} MiB",
            Holds.judge(tiled < 1.3 and full > 1.7),
            "peak memory besides queries, keys and values",
            {"tiled_growth": tiled, "full_growth": full},
        ),
    ]


def judge_modes(rows: Rows) -> ClaimVerdict:
    reference, *modes = rows[0]["seconds"]  # The first is what the engine itself would choose.
    ratios = {mode: [row["seconds"][mode] / row["seconds"][reference] for row in rows] for mode in modes}
    bursted = ratios["bursted"]
    return ClaimVerdict(
        "One call for all requests beats one call per request",
        GUIDES,
        "; ".join(f"{mode} takes {min(times):.1f}x to {max(times):.1f}x as long" for mode, times in ratios.items())
        + f" as {reference}",
        Holds.judge(min(bursted) > 1, max(bursted) > 1),
        "the attention of one layer over batches of several sizes and length variations; the padded call is one call "
        "too, but looks at padding",
        {f"{mode}_{end}": value for mode, f in ratios.items() for end, value in (("least", min(f)), ("most", max(f)))},
    )


def judge_cache(rows: Rows) -> ClaimVerdict:
    kept = growth([row["tokens"] for row in rows], [row["cached_seconds"] for row in rows])
    tail = rows[-3:]  # short texts cost what starting a step costs
    anew = growth([row["tokens"] for row in tail], [row["recompute_seconds"] for row in tail])
    last = rows[-1]
    return ClaimVerdict(
        "Generating n tokens takes O(n) with a KV cache and O(n²) without",
        GUIDES,
        f"n^{kept:.2f} and n^{anew:.2f} (from {tail[0]['tokens']} tokens on); {last['tokens']} tokens: "
        f"{last['cached_seconds']:.2f} s and {last['recompute_seconds']:.2f} s",
        Holds.judge(kept < 1.2 and anew > 1.7, kept < 1.2 and anew > 1.3),
        f"{last['cached_tokens']:,} and {last['recompute_tokens']:,} tokens went through the model; what a step costs "
        "whatever its size hides the square at first",
        {"kept_growth": kept, "anew_growth": anew, "ratio": last["recompute_seconds"] / last["cached_seconds"]},
    )


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
