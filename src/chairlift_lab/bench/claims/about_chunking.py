"""The claim about chunked prefill: gaps of decoding requests by chunk size, while a long prompt arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift_lab.bench.claims.claim import SARATHI, ClaimVerdict, Holds
from chairlift_lab.bench.claims.prompt_stall import StallPoint
from chairlift_lab.report.plots import PlotPanel


def judge_chunking(points: Sequence[StallPoint], prompt: int) -> ClaimVerdict:
    whole = next(point for point in points if point.chunk is None)
    chunked = {point.chunk: point for point in points if point.chunk is not None}
    least, most = min(chunked), max(chunked)
    shorter = whole.worst_gap / chunked[least].worst_gap
    longer = chunked[least].first_token / whole.first_token
    gaps = {f"whole: {prompt:,} tokens": whole.worst_gap}
    gaps |= {f"{chunk:,}": point.worst_gap for chunk, point in sorted(chunked.items(), reverse=True)}
    return ClaimVerdict(
        "Chunked prefill keeps running requests going while a long prompt arrives; small chunks delay its first token",
        SARATHI,
        "worst gap between tokens "
        + ", ".join(f"{gap * 1e3:,.0f} ({name})" for name, gap in gaps.items())
        + f" ms (chunk): {shorter:.0f}x less; time to first token {whole.first_token:.1f} s whole, "
        f"{chunked[most].first_token:.1f} s in chunks of {most:,}, {chunked[least].first_token:.1f} s of {least}",
        Holds.judge(shorter >= 4 and longer >= 1, shorter >= 4),
        f"a chunk is a step for all, and a step costs something whatever its size: chunks of {least} take "
        f"{longer:.2f}x as long to the first token. A small random model, others generating",
        {f"worst_gap_{point.chunk or 'whole'}": point.worst_gap for point in points}
        | {f"first_token_{point.chunk or 'whole'}": point.first_token for point in points},
    )


def chunking_panel(points: Sequence[StallPoint], prompt: int) -> PlotPanel:
    def draw(axes: Any) -> None:
        axes.set_title(f"A prompt of {prompt:,} tokens arrives")
        ordered = sorted(points, key=lambda point: point.chunk or prompt)
        chunks = [point.chunk or prompt for point in ordered]
        lines = {
            "its time to first token": [point.first_token for point in ordered],
            "worst gap of the others": [point.worst_gap for point in ordered],
            "median gap of the others": [point.median_gap for point in ordered],
        }
        for colour, (label, seconds) in zip(("tab:orange", "tab:red", "tab:blue"), lines.items(), strict=True):
            axes.plot(chunks, [value * 1e3 for value in seconds], marker="o", color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(chunks, [f"{point.chunk}" if point.chunk else "whole" for point in ordered], fontsize=7)
        axes.set_xlabel("tokens per chunk")
        axes.set_ylabel("ms")
        axes.legend(fontsize=8)

    return draw
