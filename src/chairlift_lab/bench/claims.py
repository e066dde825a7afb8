"""Published claims about batching and attention, next to what is measured here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift_lab.bench.attention import (
    AttentionResults,
    AttentionSettings,
    ModesPoint,
    RecomputePoint,
    SharingPoint,
    TilingPoint,
    attention_panels,
    run_attention,
)
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.chunking import ChunkingSettings, engine_for_long_prompts, run_long_prompts
from chairlift_lab.bench.policies import (
    AT_ONCE,
    POISSON,
    PoliciesSettings,
    PolicyPoint,
    Strategy,
    compare_policies,
    policy_panels,
)
from chairlift_lab.common.engine_run import measure_engine, serve_at_once
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.floor import ceilings_for
from chairlift_lab.common.measure import percentile
from chairlift_lab.common.plot import Plot, Value, picture
from chairlift_lab.common.timing import growth
from chairlift_lab.common.workload import LengthRange, SpreadLengths, full_length, make_workload
from chairlift_lab.report.lists import number_list, parse_names
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    pass


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


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """Arithmetic that one decoding request gets done, and the most that matrix products get done here, in FLOP/s."""

    achieved: float
    ceiling: float

    @property
    def share(self) -> float:
        return self.achieved / self.ceiling


def measure_compute_share(maker: EngineMaker, *, tokens: int = 24, note: Note = lambda text: None) -> ComputeShare:
    """Two operations per weight and token; attention over so short a text is negligible."""
    note("one request alone")
    length = LengthRange(tokens, tokens)
    workload = make_workload(maker.vocabulary(), requests=1, prompt_len=length, output_len=length, seed=0)
    measured = measure_engine(maker.engine(max_batch_requests=1, prefix_caching=False), workload, lambda tokens: None)
    gaps = [later - earlier for earlier, later in pairwise(measured.token_times[0])]
    note("the largest matrix products")
    ceiling = ceilings_for(maker.loaded.model).flops_per_second
    return ComputeShare(2 * maker.num_parameters() / percentile(gaps, 50), ceiling)


@dataclass(frozen=True, slots=True)
class BatchSizePoint:
    requests: int
    tokens_per_s: float


def compare_batch_sizes(
    maker: EngineMaker,
    *,
    sizes: Sequence[int] = (1, 4, 16, 64),
    prompt: int = 32,
    output: int = 24,
    note: Note = lambda text: None,
) -> list[BatchSizePoint]:
    """The throughput of full batches. Small batches get fewer requests: a rate does not depend on the duration."""
    points = []
    for count in sizes:
        note(f"{count} requests at a time")
        workload = make_workload(
            maker.vocabulary(),
            requests=max(count, 3),
            prompt_len=LengthRange(prompt, prompt),
            output_len=LengthRange(output, output),
            seed=0,
        )
        engine = maker.engine(max_batch_requests=count, prefix_caching=False)
        row = measure_engine(engine, workload, lambda tokens: None).row("")
        points.append(BatchSizePoint(count, row["output_tokens_per_s"]))
    return points


@dataclass(frozen=True, slots=True)
class KVWaste:
    """The share of the reserved memory that holds no token, averaged over all steps of a workload."""

    paged: float
    contiguous: float  # if each request reserved the longest sequence there may be


def measure_kv_waste(
    maker: EngineMaker, *, requests: int = 32, prompt: int = 161, output: int = 338, max_len: int = 2048
) -> KVWaste:
    """Lengths like those of recorded chats (the defaults are the means of ShareGPT in the PagedAttention paper)."""
    engine = maker.engine(max_batch_requests=16, max_model_len=max_len, prefix_caching=False)
    source = random.Random(0)
    prompts, outputs = (SpreadLengths(mean, 1.0, max_len // 2 - 1) for mean in (prompt, output))
    for _ in range(requests):
        prompt_ids = [source.randrange(10, 1000) for _ in range(prompts.draw(source))]
        engine.submit(prompt_ids, full_length(outputs.draw(source)))
    tokens = in_blocks = reserved = 0
    scheduler = engine.scheduler
    while engine.has_work:
        engine.step()
        for request in scheduler.running:
            tokens += request.num_computed
            in_blocks += len(scheduler.kv.table(request)) * scheduler.kv.block_size
            reserved += max_len
    return KVWaste(paged=1 - tokens / in_blocks, contiguous=1 - tokens / reserved)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests with a common start, with and without sharing it."""

    prefix_blocks: int  # Blocks that the common start fills.
    shared_blocks: int  # most in use while three of them run
    separate_blocks: int
    shared_batch: int  # most requests in a step, where memory holds `separate_batch` of them without sharing
    separate_batch: int


def measure_shared_prefix(maker: EngineMaker, *, prefix: int = 1000, own: int = 16, crowd: int = 12) -> SharedPrefix:
    """Three requests in ample memory, then a crowd of them in memory for three."""
    block_size = maker.config().block_size
    per_request = -(-(prefix + 2 * own) // block_size)
    memory = maker.kv_memory(3 * per_request)
    few, many = _share(maker, 3, prefix, own, None), _share(maker, crowd, prefix, own, memory)
    return SharedPrefix(prefix // block_size, few[True][0], few[False][0], many[True][1], many[False][1])


def _share(
    maker: EngineMaker, requests: int, prefix: int, own: int, kv_memory: int | None
) -> dict[bool, tuple[int, int]]:
    """By whether prefixes are cached: the most blocks in use, and the most requests in a step."""
    found = {}
    for caching in (False, True):
        options: dict[str, Any] = {"kv_memory": kv_memory} if kv_memory else {}
        engine = maker.engine(prefix_caching=caching, max_batch_requests=requests, max_batch_tokens=2048, **options)
        common = [10 + i % 900 for i in range(prefix)]
        steps = serve_at_once(
            engine, [common + [10 + index] * own for index in range(requests)], [own] * requests
        ).steps
        found[caching] = (max(step.used_blocks for step in steps), max(step.requests for step in steps))
    return found


def measure_joining_padding(maker: EngineMaker, attention: str, *, prompt: int = 100, batch: int = 8) -> int:
    """Padding in the step in which a prompt becomes the last of a batch whose others decode."""
    engine = maker.engine(attention=attention, max_batch_requests=batch, prefix_caching=False, max_batch_tokens=512)
    for index in range(batch - 1):
        engine.submit([10 + index], full_length(8))
    engine.step()
    steps = serve_at_once(engine, [[50 + i for i in range(prompt)]], [8]).steps
    (joined,) = [step for step in steps if step.prefill_tokens == prompt]
    assert joined.requests == batch
    return joined.padding_tokens


CHUNKS = (128, 256, 512, 1024, 2048, 4096)
WARM_UP = 256  # tokens of a prompt that comes first and does not count


@dataclass(frozen=True, slots=True)
class StallPoint:
    """One chunk size, or None: the whole prompt in one step. Times are seconds."""

    chunk: int | None
    worst_gap: float  # between two tokens of a request that was generating
    median_gap: float
    first_token: float  # The long prompt's time to first token.

    def row(self) -> dict[str, Any]:
        return {
            "name": "no chunks" if self.chunk is None else f"chunk {self.chunk}",
            "chunk": self.chunk,
            "itl_max_ms": self.worst_gap * 1e3,
            "itl_p50_ms": self.median_gap * 1e3,
            "ttft_ms": self.first_token * 1e3,
        }


def random_maker(device: str = "auto", dtype: str = "auto") -> EngineMaker:
    """Engines around a small random model with a context long enough."""
    from chairlift.engine.settings import resolve_machine
    from chairlift.engine.startup import LoadedModel
    from chairlift.models.dummy import dummy_tokenizer
    from chairlift_lab.common.model_shapes import random_llama

    config = EngineConfig(device=device, dtype=dtype)
    machine = resolve_machine(config)
    model = random_llama(machine.device, machine.dtype)
    loaded = LoadedModel("a small random Llama", model, dummy_tokenizer(), frozenset())
    return EngineMaker(loaded, {"device": device, "dtype": dtype})


def measure_stalls(
    maker: EngineMaker,
    *,
    prompt_len: int = 10_000,
    chunks: Sequence[int] = CHUNKS,
    decodes: int = 8,
    note: Note = lambda text: None,
) -> list[StallPoint]:
    """The prompt in one step first, then in chunks; `decodes` requests generate all the while."""
    settings = ChunkingSettings(decodes=decodes, prompts=1, prompt_len=prompt_len)
    points = []
    for chunk in (None, *chunks):
        note("no chunks" if chunk is None else f"chunks of {chunk} tokens")
        size = chunk or prompt_len
        engine = engine_for_long_prompts(maker, settings, max_batch_tokens=size, max_prefill_tokens=size)
        run = run_long_prompts(engine, maker.vocabulary(), settings, warm_up=WARM_UP)
        median = sorted(run.gaps)[len(run.gaps) // 2]
        points.append(StallPoint(chunk, max(run.gaps), median, run.first_tokens[0]))
    return points


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


def chunking_panel(points: Sequence[StallPoint], prompt: int) -> Plot:
    seconds: dict[str, Value] = {
        "its time to first token": lambda point: point.first_token,
        "worst gap of the others": lambda point: point.worst_gap,
        "median gap of the others": lambda point: point.median_gap,
    }
    return Plot(
        title=f"A prompt of {prompt:,} tokens arrives",
        rows=sorted(points, key=lambda point: point.chunk or prompt),
        x=lambda point: point.chunk or prompt,
        y=seconds,
        lines=True,
        factor=1e3,
        x_label="tokens per chunk; the last: the whole prompt",
        y_label="ms",
        log="xy",
        colours=("tab:orange", "tab:red", "tab:blue"),
    )


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


POLICIES = PoliciesSettings(
    strategies=tuple(Strategy.parse(text) for text in ("continuous", "dynamic", "static", "static/padded")),
)
ATTENTION = AttentionSettings(batches=(4, 16, 64), variations=(0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsSettings:
    """The defaults take about ten minutes on two cores with the default model."""

    batch_sizes: Sequence[int] = (1, 4, 16, 64)
    policies: PoliciesSettings = POLICIES
    attention: AttentionSettings = ATTENTION
    chunks: Sequence[int] = (128, 256, 512, 1024, 2048, 4096)
    chunked_prompt: int = 10_000
    joining_prompt: int = 100
    joining_batch: int = 8
    waste_requests: int = 32
    shared_prefix: int = 1000


@dataclass(slots=True)
class ClaimsResults:
    """The verdicts, and the points for the plot."""

    settings: ClaimsSettings
    verdicts: list[ClaimVerdict] = field(default_factory=list)
    batch_sizes: list[BatchSizePoint] = field(default_factory=list)
    policies: list[PolicyPoint] = field(default_factory=list)
    stalls: list[StallPoint] = field(default_factory=list)
    attention: AttentionResults = field(default_factory=AttentionResults)


class _Claims:
    """One method for each group of claims that share a measurement."""

    def __init__(self, maker: EngineMaker, settings: ClaimsSettings, note: Note) -> None:
        self._maker = maker
        self._settings = settings
        self._note = note
        self.results = ClaimsResults(settings)

    def compute(self) -> list[ClaimVerdict]:
        return [judge_compute_share(measure_compute_share(self._maker, note=self._note))]

    def batching(self) -> list[ClaimVerdict]:
        self.results.batch_sizes = compare_batch_sizes(self._maker, sizes=self._settings.batch_sizes, note=self._note)
        return [judge_batching(self.results.batch_sizes)]

    def policies(self) -> list[ClaimVerdict]:
        points = self.results.policies = compare_policies(self._maker, self._settings.policies, note=self._note)
        judges = (
            judge_continuous_vs_dynamic,
            judge_continuous_vs_static,
            judge_useful_tokens,
        )
        return [judge(points) for judge in judges]

    def padding(self) -> list[ClaimVerdict]:
        self._note("a prompt that joins a batch")
        prompt, batch = self._settings.joining_prompt, self._settings.joining_batch
        found = {
            mode: measure_joining_padding(self._small(), mode, prompt=prompt, batch=batch)
            for mode in ("padded", "ragged", "bursted")
        }
        return [judge_joining_padding(found, prompt, batch)]

    def chunking(self) -> list[ClaimVerdict]:
        prompt = self._settings.chunked_prompt
        points = self.results.stalls = measure_stalls(
            self._small(), prompt_len=prompt, chunks=self._settings.chunks, note=self._note
        )
        return [judge_chunking(points, prompt)]

    def prefix(self) -> list[ClaimVerdict]:
        self._note("a prefix that requests share")
        return [judge_shared_prefix(measure_shared_prefix(self._small(), prefix=self._settings.shared_prefix))]

    def waste(self) -> list[ClaimVerdict]:
        self._note("KV memory that holds nothing")
        return [judge_kv_waste(measure_kv_waste(self._small(), requests=self._settings.waste_requests))]

    def heads(self) -> list[ClaimVerdict]:
        self.results.attention.sharing = self._attention("sharing").sharing
        return [judge_head_sharing(self.results.attention.sharing)]

    def tiling(self) -> list[ClaimVerdict]:
        self.results.attention.tiling = self._attention("tiling").tiling
        return judge_tiling(self.results.attention.tiling)

    def modes(self) -> list[ClaimVerdict]:
        self.results.attention.modes = self._attention("modes").modes
        return [judge_modes(self.results.attention.modes)]

    def cache(self) -> list[ClaimVerdict]:
        self.results.attention.cache = self._attention("cache").cache
        return [judge_cache(self.results.attention.cache)]

    def _attention(self, experiment: str) -> AttentionResults:
        from chairlift.engine.settings import resolve_machine

        machine = resolve_machine(self._maker.config())
        return run_attention(
            self._settings.attention,
            machine.device,
            machine.dtype,
            experiments=[experiment],
            note=self._note,
        )

    def _small(self) -> EngineMaker:
        """Engines of a small model, for what is counted and not timed."""
        config = self._maker.config()
        return random_maker(config.device, config.dtype)


GROUPS: dict[str, Callable[[_Claims], list[ClaimVerdict]]] = {
    "compute": _Claims.compute,
    "batching": _Claims.batching,
    "policies": _Claims.policies,
    "padding": _Claims.padding,
    "chunking": _Claims.chunking,
    "prefix": _Claims.prefix,
    "heads": _Claims.heads,
    "waste": _Claims.waste,
    "tiling": _Claims.tiling,
    "modes": _Claims.modes,
    "cache": _Claims.cache,
}


def run_claims(
    maker: EngineMaker,
    settings: ClaimsSettings,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    note: Note = lambda text: None,
) -> ClaimsResults:
    claims = _Claims(maker, settings, note)
    for name in groups:
        claims.results.verdicts += GROUPS[name](claims)
    return claims.results


def claims_panels(results: ClaimsResults) -> list[Plot]:
    """A panel for each figure of the claims that were measured."""
    panels: list[Plot] = []
    if results.batch_sizes:
        panels.append(
            Plot(
                title="Requests at a time",
                rows=results.batch_sizes,
                x=lambda point: point.requests,
                y=lambda point: point.tokens_per_s,
                lines=True,
                x_label="requests",
                y_label="output tokens/s",
                log="x",
                limits=(0, None),
            )
        )
    panels += policy_panels(results.policies)
    if results.stalls:
        panels.append(chunking_panel(results.stalls, results.settings.chunked_prompt))
    return panels + attention_panels(results.attention)


_COLOURS = {"yes": "green", "partly": "yellow", "no": "red"}


@bench(
    "claims",
    "chairlift bench claims",
    "chairlift bench claims --claims tiling,cache --plot claims.png",
    report=ReportOptions,
)
def bench_claims(
    context: typer.Context,
    engine: EngineOptions,
    note: Note,
    claims: Annotated[str, typer.Option(help="Groups of claims to measure.", show_default="all")] = "",
    sizes: Annotated[Sequence[int], number_list("Prompt tokens for FlashAttention.")] = (
        *(512, 1024, 2048),
        *(4096, 8192, 16384),
    ),
    requests: Annotated[int, typer.Option(help="Requests for the batching policies.")] = 64,
) -> BenchResult:
    """Published claims about batching and attention, next to what is measured here.

    A claim that does not hold on this machine is shown with the reason. Takes
    about ten minutes on two cores.
    """
    from chairlift_lab.common.engines import EngineMaker

    chosen_here = ("policy", "attention", "max_batch_requests", "prefix_caching", "max_delay_ms")
    refuse_given(context, chosen_here, "is chosen by this bench")
    groups = parse_names("claims", claims, GROUPS) if claims else list(GROUPS)
    default = ClaimsSettings()
    settings = replace(
        default,
        attention=replace(default.attention, tiling_sizes=sizes),
        policies=replace(default.policies, requests=requests),
    )
    maker = EngineMaker.from_options(engine, note)
    results = run_claims(maker, settings, groups=groups, note=note)
    panels = claims_panels(results)
    return BenchResult(
        maker.settings() | {"claims": groups, "requests": requests, "tiling_sizes": sizes},
        [verdict.row() for verdict in results.verdicts],
        [ClaimsTable(results.verdicts)],
        picture("Published claims, measured", panels, columns=3) if panels else None,
    )


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
