"""Claims about batching: compute use of one request, and gains of batches and of continuous batching."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_lab.bench.claims.batch_sizes import BatchSizePoint, ComputeShare
from chairlift_lab.bench.claims.claim import ANYSCALE, GUIDES, HUGGING_FACE, ClaimVerdict, Holds
from chairlift_lab.bench.policies.run import AT_ONCE, POISSON, PolicyPoint


def judge_compute_share(found: ComputeShare) -> ClaimVerdict:
    return ClaimVerdict(
        "One request uses less than 10% of the compute",
        GUIDES,
        f"{found.share:.1%}: {found.achieved / 1e9:,.1f} of {found.ceiling / 1e9:,.1f} GFLOP/s",
        Holds.judge(found.share < 0.1),
        "decoding one token reads every weight for two operations on it, so memory sets the pace",
        {"share": found.share, "achieved_flops": found.achieved, "ceiling_flops": found.ceiling},
    )


def judge_batching(points: Sequence[BatchSizePoint]) -> ClaimVerdict:
    alone, best = points[0], max(points, key=lambda point: point.tokens_per_s)
    ratio = best.tokens_per_s / alone.tokens_per_s
    return ClaimVerdict(
        "Batching gets 5–10x more done than one request at a time",
        GUIDES,
        f"{ratio:.1f}x with {best.requests} requests: "
        + ", ".join(f"{point.tokens_per_s:,.0f} ({point.requests})" for point in points)
        + " tokens/s (requests)",
        Holds.judge(ratio >= 5, ratio >= 2.5),
        "it grows until arithmetic, not memory, sets the pace; where that is depends on the machine and the model",
        {f"tokens_per_s_{point.requests}": point.tokens_per_s for point in points} | {"ratio": ratio},
    )


def judge_continuous_vs_dynamic(points: Sequence[PolicyPoint]) -> ClaimVerdict:
    gains = _gains(points, POISSON, "dynamic")
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


def judge_continuous_vs_static(points: Sequence[PolicyPoint]) -> ClaimVerdict:
    classic = "static/padded" if any(str(point.strategy) == "static/padded" for point in points) else "static"
    gains = _gains(points, AT_ONCE, classic)
    best = max(gains.values())
    worst_share = min(_row(points, AT_ONCE, classic, variation)["useful_token_share"] for variation in gains)
    return ClaimVerdict(
        "Continuous batching gets up to 10–20x more done than static batching where lengths vary much",
        ANYSCALE,
        _list_by_variation(gains, "{:.1f}x", shift=0) + f", against {classic}",
        Holds.judge(best >= 10, best >= 2),
        f"with the same engine on both sides, all that static batching can lose is its padding: at worst "
        f"{worst_share:.0%} of its tokens were useful here. Larger figures also compare engines and memory management",
        {f"ratio_at_{variation:g}": gain for variation, gain in gains.items()},
    )


def judge_useful_tokens(points: Sequence[PolicyPoint]) -> ClaimVerdict:
    shares = {
        strategy: [point.row()["useful_token_share"] for point in points if str(point.strategy) == strategy]
        for strategy in dict.fromkeys(str(point.strategy) for point in points)
    }
    static = [share for strategy, found in shares.items() if strategy.startswith("static") for share in found]
    continuous = shares["continuous"]
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


def _gains(points: Sequence[PolicyPoint], arrivals: str, other: str) -> dict[float, float]:
    """By length variation: how much more continuous batching got done than `other`."""
    variations = sorted({point.variation for point in points})
    return {
        variation: _row(points, arrivals, "continuous", variation)["output_tokens_per_s"]
        / _row(points, arrivals, other, variation)["output_tokens_per_s"]
        for variation in variations
    }


def _row(points: Sequence[PolicyPoint], arrivals: str, strategy: str, variation: float) -> dict[str, float]:
    return next(
        point.row()
        for point in points
        if (point.arrivals, str(point.strategy), point.variation) == (arrivals, strategy, variation)
    )


def _list_by_variation(values: dict[float, float], form: str, *, shift: float) -> str:
    return ", ".join(f"{form.format(value + shift)} at variation {key:g}" for key, value in values.items())
