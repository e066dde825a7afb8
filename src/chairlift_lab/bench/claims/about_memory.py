"""Claims about attention and its memory: tiles, shared heads, pages, prefixes, and the cache itself."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift_lab.bench.attention.kernels import SharingPoint, TilingPoint
from chairlift_lab.bench.attention.kv_recompute import RecomputePoint
from chairlift_lab.bench.attention.modes import ModesPoint
from chairlift_lab.bench.claims.claim import FLASH_ATTENTION, GQA, GUIDES, PAGED_ATTENTION, ClaimVerdict, Holds
from chairlift_lab.bench.claims.kv_accounting import KVWaste, SharedPrefix
from chairlift_lab.common.timing import growth


def judge_shared_prefix(found: SharedPrefix) -> ClaimVerdict:
    saved = found.separate_blocks - found.shared_blocks
    once = 2 * found.prefix_blocks
    return ClaimVerdict(
        "Three requests with the same 1,000 tokens hold them once, and a larger batch fits",
        PAGED_ATTENTION,
        f"{found.shared_blocks} blocks instead of {found.separate_blocks} ({saved} saved; 2 × {found.prefix_blocks} "
        f"are the common tokens); {found.shared_batch} requests at a time instead of {found.separate_batch}",
        Holds.judge(saved >= once and found.shared_batch > found.separate_batch),
        "counted by the block pool",
        {
            "shared_blocks": found.shared_blocks,
            "separate_blocks": found.separate_blocks,
            "shared_batch": found.shared_batch,
            "separate_batch": found.separate_batch,
        },
    )


def judge_head_sharing(points: Sequence[SharingPoint]) -> ClaimVerdict:
    mha, gqa, _ = points
    smaller = mha.bytes_per_token / gqa.bytes_per_token
    batch = gqa.largest_batch / mha.largest_batch
    faster = mha.decode_seconds / gqa.decode_seconds
    return ClaimVerdict(
        f"GQA with {mha.kv_heads // gqa.kv_heads} query heads per KV head: a 4x smaller KV cache, about 4x the batch",
        GQA,
        f"{smaller:.1f}x smaller, {batch:.1f}x the batch in the same memory; decode attention {faster:.1f}x faster",
        Holds.judge(smaller >= 4 and batch >= 3.9),
        "the batch is what the memory formula allows; decoding gains as far as reading keys and values sets its pace",
        {"smaller": smaller, "batch": batch, "faster": faster},
    )


def judge_kv_waste(found: KVWaste) -> ClaimVerdict:
    return ClaimVerdict(
        "Reserving the longest sequence wastes 60–80% of KV memory, pages less than 4%",
        PAGED_ATTENTION,
        f"{found.contiguous:.0%} reserved, {found.paged:.1%} paged",
        Holds.judge(found.contiguous >= 0.6 and found.paged < 0.04, found.paged < 0.04),
        "averaged over all steps of a workload with the mean lengths of recorded chats; longer limits waste more",
        {"contiguous": found.contiguous, "paged": found.paged},
    )


def judge_tiling(points: Sequence[TilingPoint]) -> list[ClaimVerdict]:
    both = [(point, point.full_seconds / point.tiled_seconds) for point in points if point.full_seconds is not None]
    ratios = {point.tokens: ratio for point, ratio in both}
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
    memory = [point for point in points if point.full_bytes and point.tiled_bytes]
    if len(memory) < 2:
        return [time]
    sizes = [point.tokens for point in memory]
    full = growth(sizes, [point.full_bytes or 0 for point in memory])
    tiled = growth(sizes, [point.tiled_bytes or 0 for point in memory])
    last = memory[-1]
    assert last.full_bytes is not None
    assert last.tiled_bytes is not None
    return [
        time,
        ClaimVerdict(
            "FlashAttention needs memory of order N, the score matrix of order N²",
            FLASH_ATTENTION,
            f"N^{tiled:.2f} and N^{full:.2f}; at {last.tokens:,} tokens {last.tiled_bytes / 2**20:,.0f} and "
            f"{last.full_bytes / 2**20:,.0f} MiB",
            Holds.judge(tiled < 1.3 and full > 1.7),
            "peak memory besides queries, keys and values",
            {"tiled_growth": tiled, "full_growth": full},
        ),
    ]


def judge_modes(points: Sequence[ModesPoint]) -> ClaimVerdict:
    reference = next(iter(points[0].seconds))  # what the engine itself would choose
    ratios = {
        mode: [point.seconds[mode] / point.seconds[reference] for point in points]
        for mode in points[0].seconds
        if mode != reference
    }
    bursted = ratios["bursted"]
    return ClaimVerdict(
        "One call for all requests beats one call per request",
        GUIDES,
        "; ".join(f"{mode} takes {min(found):.1f}x to {max(found):.1f}x as long" for mode, found in ratios.items())
        + f" as {reference}",
        Holds.judge(min(bursted) > 1, max(bursted) > 1),
        "the attention of one layer over batches of several sizes and length variations; the padded call is one call "
        "too, but looks at padding",
        {f"{mode}_{end}": value for mode, f in ratios.items() for end, value in (("least", min(f)), ("most", max(f)))},
    )


def judge_cache(points: Sequence[RecomputePoint]) -> ClaimVerdict:
    sizes = [point.tokens for point in points]
    kept = growth(sizes, [point.cached_seconds for point in points])
    tail = points[-3:]  # short texts cost what starting a step costs
    anew = growth([point.tokens for point in tail], [point.recompute_seconds for point in tail])
    last = points[-1]
    return ClaimVerdict(
        "Generating n tokens takes O(n) with a KV cache and O(n²) without",
        GUIDES,
        f"n^{kept:.2f} and n^{anew:.2f} (from {tail[0].tokens} tokens on); {last.tokens} tokens: "
        f"{last.cached_seconds:.2f} s and {last.recompute_seconds:.2f} s",
        Holds.judge(kept < 1.2 and anew > 1.7, kept < 1.2 and anew > 1.3),
        f"{last.cached_tokens:,} and {last.recompute_tokens:,} tokens went through the model; what a step costs "
        "whatever its size hides the square at first",
        {"kept_growth": kept, "anew_growth": anew, "ratio": last.recompute_seconds / last.cached_seconds},
    )
