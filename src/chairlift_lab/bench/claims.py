"""Published claims about batching and attention, next to what is measured here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, refuse_given
from chairlift_lab.bench.attention import AttentionSettings, attention_panels, run_attention
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.bench.policies import PoliciesSettings, Strategy, compare_policies, policy_panels
from chairlift_lab.common import verdicts
from chairlift_lab.common.engines import EngineMaker, Measurement, measure_engine, percentile, serve_at_once
from chairlift_lab.common.floor import ceilings_for
from chairlift_lab.common.long_prompts import ChunkingSettings, engine_for_long_prompts, run_long_prompts
from chairlift_lab.common.verdicts import ClaimsTable, ClaimVerdict
from chairlift_lab.common.workload import LengthRange, SpreadLengths, full_length, make_workload
from chairlift_lab.report.options import Plot, ReportOptions, number_list, parse_names, picture

Rows = Sequence[Mapping[str, Any]]


def measure_alike(maker: EngineMaker, slots: int, requests: int, prompt: int, output: int) -> Measurement:
    """Requests of the same lengths on an engine with this number of slots."""
    lengths = {"prompt_len": LengthRange(prompt, prompt), "output_len": LengthRange(output, output)}
    workload = make_workload(maker.vocabulary(), requests=requests, seed=0, **lengths)
    return measure_engine(maker.engine(max_batch_requests=slots, prefix_caching=False), workload, lambda tokens: None)


def measure_compute_share(maker: EngineMaker, *, tokens: int = 24, note: Note = lambda text: None) -> dict[str, float]:
    """FLOP/s that one decoding request gets done, and the most that matrix products get done here.

    Two operations per weight and token; attention over so short a text is negligible.
    """
    note("one request alone")
    (times,) = measure_alike(maker, 1, 1, tokens, tokens).token_times
    gaps = [later - earlier for earlier, later in pairwise(times)]
    note("the largest matrix products")
    ceiling = ceilings_for(maker.loaded.model).flops_per_second
    achieved = 2 * maker.num_parameters() / percentile(gaps, 50)
    return {"share": achieved / ceiling, "achieved_flops": achieved, "ceiling_flops": ceiling}


def measure_kv_waste(
    maker: EngineMaker, *, requests: int = 32, prompt: int = 161, output: int = 338, max_len: int = 2048
) -> dict[str, float]:
    """The share of the reserved memory that holds no token, over all steps: in pages, and in whole sequences.

    Lengths are like those of recorded chats (the defaults are the means of ShareGPT in the PagedAttention paper).
    """
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
    return {"contiguous": 1 - tokens / reserved, "paged": 1 - tokens / in_blocks}


def measure_shared_prefix(maker: EngineMaker, *, prefix: int = 1000, own: int = 16, crowd: int = 12) -> dict[str, int]:
    """Three requests with a common start in ample memory, then a crowd of them in memory for three.

    The figures: the blocks that the common start fills; the most blocks in use by three requests, and the most of the
    crowd in a step, with and without sharing the start.
    """
    block_size = maker.config().block_size
    memory = maker.kv_memory(3 * -(-(prefix + 2 * own) // block_size))
    figures = {"prefix_blocks": prefix // block_size}
    common = [10 + i % 900 for i in range(prefix)]
    for caching, name in ((False, "separate"), (True, "shared")):
        for requests, kv_memory in ((3, None), (crowd, memory)):
            engine = maker.engine(
                prefix_caching=caching, max_batch_requests=requests, max_batch_tokens=2048, kv_memory=kv_memory
            )
            prompts = [common + [10 + index] * own for index in range(requests)]
            steps = serve_at_once(engine, prompts, [own] * requests).steps
            if kv_memory:
                figures[f"{name}_batch"] = max(step.requests for step in steps)
            else:
                figures[f"{name}_blocks"] = max(step.used_blocks for step in steps)
    return figures


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
) -> list[dict[str, Any]]:
    """A row for each chunk size, None for the whole prompt in one step; `decodes` requests generate all the while.

    `worst_gap` and `median_gap` are seconds between two tokens of those, `first_token` those to the prompt's first.
    """
    settings = ChunkingSettings(decodes=decodes, prompts=1, prompt_len=prompt_len)
    rows = []
    for chunk in (None, *chunks):
        note("no chunks" if chunk is None else f"chunks of {chunk} tokens")
        size = chunk or prompt_len
        engine = engine_for_long_prompts(maker, settings, max_batch_tokens=size, max_prefill_tokens=size)
        run = run_long_prompts(engine, maker.vocabulary(), settings, warm_up=WARM_UP)
        gaps = sorted(run.gaps)
        rows.append(
            {
                "chunk": chunk,
                "worst_gap": gaps[-1],
                "median_gap": gaps[len(gaps) // 2],
                "first_token": run.first_tokens[0],
            }
        )
    return rows


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
    chunks: Sequence[int] = CHUNKS
    chunked_prompt: int = 10_000
    joining_prompt: int = 100
    joining_batch: int = 8
    waste_requests: int = 32
    shared_prefix: int = 1000


@dataclass(slots=True)
class ClaimsRun:
    """The engines, the verdicts of the groups, and what is drawn: panels by group, and the rows about attention."""

    maker: EngineMaker
    settings: ClaimsSettings
    note: Note
    verdicts: list[ClaimVerdict] = field(default_factory=list)
    panels: dict[str, list[Plot]] = field(default_factory=dict)
    attention_rows: list[dict[str, Any]] = field(default_factory=list)

    def small(self) -> EngineMaker:
        """Engines of a small model, for what is counted and not timed."""
        config = self.maker.config()
        return random_maker(config.device, config.dtype)

    def attention(self, experiment: str) -> Rows:
        from chairlift.engine.settings import resolve_machine

        machine, settings = resolve_machine(self.maker.config()), self.settings.attention
        rows = run_attention(settings, machine.device, machine.dtype, experiments=[experiment], note=self.note)
        self.attention_rows += rows
        return rows


def _batching(run: ClaimsRun) -> list[ClaimVerdict]:
    """Tokens/s of full batches by size. Small ones get fewer requests: a rate does not depend on the duration."""
    rates = {}
    for count in run.settings.batch_sizes:
        run.note(f"{count} requests at a time")
        measured = measure_alike(run.maker, count, requests=max(count, 3), prompt=32, output=24)
        rates[count] = measured.row("")["output_tokens_per_s"]
    by_size = partial(Plot, x=lambda rate: rate[0], y=lambda rate: rate[1], lines=True, log="x", limits=(0, None))
    y_label, rows = "output tokens/s", list(rates.items())
    run.panels["batching"] = [by_size(title="Requests at a time", rows=rows, x_label="requests", y_label=y_label)]
    return [verdicts.judge_batching(rates)]


def _policies(run: ClaimsRun) -> list[ClaimVerdict]:
    rows = compare_policies(run.maker, run.settings.policies, note=run.note)
    run.panels["policies"] = policy_panels(rows)
    dynamic, static = verdicts.judge_continuous_vs_dynamic(rows), verdicts.judge_continuous_vs_static(rows)
    return [dynamic, static, verdicts.judge_useful_tokens(rows)]


def _padding(run: ClaimsRun) -> list[ClaimVerdict]:
    run.note("a prompt that joins a batch")
    prompt, batch = run.settings.joining_prompt, run.settings.joining_batch
    padding = {
        mode: measure_joining_padding(run.small(), mode, prompt=prompt, batch=batch)
        for mode in ("padded", "ragged", "bursted")
    }
    return [verdicts.judge_joining_padding(padding, prompt, batch)]


def _chunking(run: ClaimsRun) -> list[ClaimVerdict]:
    prompt = run.settings.chunked_prompt
    rows = measure_stalls(run.small(), prompt_len=prompt, chunks=run.settings.chunks, note=run.note)
    figures = {
        "its time to first token": "first_token",
        "worst gap of the others": "worst_gap",
        "median gap of the others": "median_gap",
    }

    def chunk(row: Mapping[str, Any]) -> int:
        return int(row["chunk"] or prompt)

    by_chunk = partial(Plot, x=chunk, y=figures, lines=True, factor=1e3, log="xy", y_label="ms")
    title, label = f"A prompt of {prompt:,} tokens arrives", "tokens per chunk; the last: the whole prompt"
    colours = ("tab:orange", "tab:red", "tab:blue")
    run.panels["chunking"] = [by_chunk(title=title, rows=sorted(rows, key=chunk), x_label=label, colours=colours)]
    return [verdicts.judge_chunking(rows, prompt)]


def _prefix(run: ClaimsRun) -> list[ClaimVerdict]:
    run.note("a prefix that requests share")
    return [verdicts.judge_shared_prefix(measure_shared_prefix(run.small(), prefix=run.settings.shared_prefix))]


def _waste(run: ClaimsRun) -> list[ClaimVerdict]:
    run.note("KV memory that holds nothing")
    return [verdicts.judge_kv_waste(measure_kv_waste(run.small(), requests=run.settings.waste_requests))]


# Claims that share a measurement.
GROUPS: dict[str, Callable[[ClaimsRun], list[ClaimVerdict]]] = {
    "compute": lambda run: [verdicts.judge_compute_share(measure_compute_share(run.maker, note=run.note))],
    "batching": _batching,
    "policies": _policies,
    "padding": _padding,
    "chunking": _chunking,
    "prefix": _prefix,
    "heads": lambda run: [verdicts.judge_head_sharing(run.attention("sharing"))],
    "waste": _waste,
    "tiling": lambda run: verdicts.judge_tiling(run.attention("tiling")),
    "modes": lambda run: [verdicts.judge_modes(run.attention("modes"))],
    "cache": lambda run: [verdicts.judge_cache(run.attention("cache"))],
}


def run_claims(
    maker: EngineMaker,
    settings: ClaimsSettings,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    note: Note = lambda text: None,
) -> ClaimsRun:
    run = ClaimsRun(maker, settings, note)
    for name in groups:
        run.verdicts += GROUPS[name](run)
    return run


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
    drawn = [panel for name in ("batching", "policies", "chunking") for panel in results.panels.get(name, ())]
    panels = [*drawn, *attention_panels(results.attention_rows)]
    return BenchResult(
        maker.settings() | {"claims": groups, "requests": requests, "tiling_sizes": sizes},
        [verdict.row() for verdict in results.verdicts],
        [ClaimsTable(results.verdicts)],
        picture("Published claims, measured", panels, columns=3) if panels else None,
    )
