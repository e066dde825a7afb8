"""Attention backends, tiling, shared KV heads and the KV cache, each against its alternative."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.attention.backends import BACKENDS
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options import at_least
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.kernel_cases import BLOCK_SIZE, plan_of
from chairlift_lab.common.model_shapes import MachineOptions
from chairlift_lab.common.timing import best_seconds, in_inference_mode, peak_bytes
from chairlift_lab.common.workload import SpreadLengths
from chairlift_lab.report.options import (
    Count,
    Counts,
    Plot,
    ReportOptions,
    Settings,
    Value,
    each,
    number_list,
    parse_names,
    picture,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.attention.backends.base import AttentionBackend
    from chairlift.attention.interface import AttentionLayer
    from chairlift.runner.base import ModelRunner

LONGEST = 8  # limit of lengths, as a multiple of the mean
KV_MEMORY = 2**30  # The memory in which sequences are to fit.
Row = dict[str, Any]

_layer, _batch = (partial(typer.Option, rich_help_panel=panel) for panel in ("Layer", "Batches"))
_numbers = partial(number_list, panel="Batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions(Settings):
    """The layer and the batches; the default layer is that of the default model."""

    heads: Annotated[Count, _layer(help="Query heads.")] = 9
    kv_heads: Annotated[Count, _layer(help="Key and value heads.")] = 3
    head_dim: Annotated[Count, _layer(help="Size of a head.")] = 64
    batches: Annotated[Counts, _numbers("Requests per batch.")] = (1, 4, 16, 64)
    variations: Annotated[
        Sequence[float],
        each(at_least(0)),
        _numbers("Variation of the lengths in a batch: standard deviation / mean.", kind=float),
    ] = (0.0, 0.5, 1.0)
    context: Annotated[Count, _batch(help="Mean length of a sequence.")] = 512
    prompt: Annotated[Count, _batch(help="Prompt tokens in a mixed batch.")] = 256
    tiling_sizes: Annotated[Counts, _numbers("Prompt tokens for the tiling experiment.", "--sizes")] = (
        *(512, 1024, 2048),
        *(4096, 8192, 16384),
    )
    cache_sizes: Annotated[Counts, _numbers("Tokens generated with and without a KV cache.")] = (32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.heads % self.kv_heads:
            raise InvalidParameter("kv_heads", f"must divide the {self.heads} heads, got {self.kv_heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings(AttentionOptions):
    """The options, and sizes that the command does not offer."""

    tiling_heads: int = 2  # the score matrix of 16k tokens takes 1 GiB per head
    sharing_heads: int = 32
    sharing_group: int = 4
    sharing_batch: int = 16


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """What every experiment gets."""

    settings: AttentionSettings
    device: torch.device
    dtype: torch.dtype
    note: Note

    def layer(self, heads: int, kv_heads: int) -> AttentionLayer:
        from chairlift.attention.interface import AttentionLayer

        size = self.settings.head_dim
        return AttentionLayer(0, heads, kv_heads, size, size**-0.5)

    def random(self, *sizes: int) -> Tensor:
        import torch

        return torch.randn(*sizes, device=self.device, dtype=self.dtype)

    def time_modes(self, layer: AttentionLayer, spans: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Seconds per backend that supports the layer; the one that the engine would choose comes first.

        The batch consists of (start, count): a request with `start` cached tokens that computes `count`.
        """
        from chairlift.attention.backends.base import choose_backend
        from chairlift.attention.batch import build_batch
        from chairlift.attention.storage import KVStorage

        plan, num_blocks = plan_of(spans)
        heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
        keys, values = (self.random(num_blocks + 1, BLOCK_SIZE, kv_heads, size) for _ in range(2))
        storage = KVStorage([keys], [values])

        def seconds(backend: AttentionBackend) -> float:
            batch = build_batch(plan, storage, self.device, rectangular=backend.capabilities.rectangular)
            # Planned once for all layers of a model, so planning is not part of a layer's cost.
            attend = backend.begin(batch, storage)
            rows = len(batch.tokens)
            q, k, v = (self.random(rows, count, size) for count in (heads, kv_heads, kv_heads))
            return best_seconds(lambda: attend.attend(layer, q, k, v), self.device)

        times = {}
        for name in sorted(BACKENDS.names(), key=lambda name: -BACKENDS.get(name).preference):
            try:
                backend = choose_backend(name, [layer], self.device, self.dtype)
            except InvalidParameter:
                continue
            times[name] = seconds(backend)
        return times


def compare_modes(run: AttentionRun) -> Iterator[Row]:
    """Decoding batches, and mixed ones in which the last request computes a prompt, in each mode."""
    settings = run.settings
    layer = run.layer(settings.heads, settings.kv_heads)
    for kind in ("decode", "mixed"):
        for variation in settings.variations:
            for batch in settings.batches:
                run.note(f"{kind}, {batch} requests, length variation {variation:g}")
                lengths = SpreadLengths(settings.context, variation, LONGEST * settings.context)
                source = random.Random(f"0 {batch} {variation}")
                spans = [(length - 1, 1) for length in (lengths.draw(source) for _ in range(batch))]
                if kind == "mixed":
                    spans[-1] = (0, settings.prompt)
                ends = [start + count for start, count in spans]
                tokens = sum(count for _, count in spans)
                yield {
                    "kind": kind,
                    "batch": batch,
                    "variation": variation,
                    "tokens": tokens,
                    "padding": batch * max(count for _, count in spans) - tokens,
                    "context": sum(ends),
                    "padded_context": batch * max(ends),
                    "seconds": run.time_modes(layer, spans),
                    "name": f"{kind}, {batch} requests, variation {variation:g}",
                }


def compare_tiling(run: AttentionRun) -> Iterator[Row]:
    """Causal attention of one sequence: torch's FlashAttention-style kernel and the plain formula."""
    import torch.nn.functional as F

    from chairlift.runner.memory import free_memory

    heads, size_of_head, device = run.settings.tiling_heads, run.settings.head_dim, run.device
    for size in run.settings.tiling_sizes:
        run.note(f"tiled and materialised, {size} tokens")
        q, k, v = (run.random(1, heads, size, size_of_head) for _ in range(3))
        tiled = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        full = partial(materialised, q, k, v)
        matrices = 3 * heads * size**2 * run.dtype.itemsize  # scores, masked scores, weights: at most
        fits = matrices < 0.9 * free_memory(device)
        yield {
            "tokens": size,
            "tiled_seconds": best_seconds(tiled, device, repeats=3),
            "full_seconds": best_seconds(full, device, repeats=3) if fits else None,
            "tiled_bytes": peak_bytes(tiled, device),
            "full_bytes": peak_bytes(full, device) if fits else None,
            "name": f"{size} tokens",
        }


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d, masked)·v with every score in memory. All [1, heads, tokens, d]."""
    import torch

    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    attended: Tensor = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ v
    return attended


def compare_head_sharing(run: AttentionRun) -> Iterator[Row]:
    """Decoding batches with MHA, GQA and MQA, and the sequences of this context that fit in KV_MEMORY."""
    from chairlift.engine.memory_plan import bytes_per_token, plan_memory

    settings = run.settings
    heads, batch, context = settings.sharing_heads, settings.sharing_batch, settings.context
    for name, kv_heads in (("MHA", heads), ("GQA", heads // settings.sharing_group), ("MQA", 1)):
        run.note(f"{name}, {batch} requests of {context} tokens")
        layer = run.layer(heads, kv_heads)
        memory = plan_memory(
            [layer],
            weight_bytes=0,
            kv_memory=KV_MEMORY,
            dtype=run.dtype,
            device=run.device,
            block_size=BLOCK_SIZE,
            max_model_len=context,
            max_batch_requests=1,
        )
        first, *_ = run.time_modes(layer, [(context - 1, 1)] * batch).values()
        yield {
            "name": name,
            "kv_heads": kv_heads,
            "bytes_per_token": bytes_per_token([layer], run.dtype),  # keys and values of one layer
            "decode_seconds": first,
            "largest_batch": memory.num_blocks // -(-context // BLOCK_SIZE),
        }


def compare_recompute(run: AttentionRun) -> Iterator[Row]:
    """One long generation with a KV cache and one without; a row is their time up to that many tokens."""
    sizes = sorted(run.settings.cache_sizes)
    longest = sizes[-1]
    runner = _runner(run.device, run.dtype, longest)
    run.note(f"{longest} tokens with a KV cache")
    cached = list(accumulate(_seconds_per_step(runner, [(i, 1) for i in range(longest)])))
    run.note(f"{longest} tokens without a KV cache")
    anew = list(accumulate(_seconds_per_step(runner, [(0, i + 1) for i in range(longest)])))
    for size in sizes:
        yield {
            "tokens": size,
            "cached_seconds": cached[size - 1],
            "recompute_seconds": anew[size - 1],
            "cached_tokens": size,  # computed by the model
            "recompute_tokens": size * (size + 1) // 2,
            "name": f"{size} tokens",
        }


def _runner(device: torch.device, dtype: torch.dtype, longest: int) -> ModelRunner:
    from chairlift.attention.backends.base import choose_backend
    from chairlift.runner.cpu import CPURunner
    from chairlift.runner.memory import allocate_storage
    from chairlift_lab.common.model_shapes import random_llama

    model = random_llama(device, dtype)
    layers = model.attention_layers
    attention = choose_backend("auto", layers, device, dtype)
    runner = CPURunner(model, attention, allocate_storage(layers, -(-longest // BLOCK_SIZE), BLOCK_SIZE, dtype, device))
    runner.warm_up()
    return runner


def _seconds_per_step(runner: ModelRunner, spans: Sequence[tuple[int, int]]) -> list[float]:
    """Each step computes (start, count) tokens of one sequence and samples a token, as generating does."""
    longest = max(start + count for start, count in spans)
    table = range(-(-longest // BLOCK_SIZE))
    request = Request("only", [0] * longest, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    seconds = []
    for step, (start, count) in enumerate(spans):
        begin = time.perf_counter()
        runner.run(StepPlan(step, (Chunk(request, start, count, table, samples=True),)))
        seconds.append(time.perf_counter() - begin)
    runner.forget(request.id)
    return seconds


EXPERIMENTS: dict[str, Callable[[AttentionRun], Iterator[Row]]] = {
    "modes": compare_modes,
    "tiling": compare_tiling,
    "sharing": compare_head_sharing,
    "cache": compare_recompute,
}


@in_inference_mode
def run_attention(
    settings: AttentionSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experiments: Sequence[str] = tuple(EXPERIMENTS),
    note: Note = lambda text: None,
) -> list[Row]:
    """The rows of all experiments, each with the name of its experiment."""
    return [
        {"experiment": name} | row | {"name": f"{name}: {row['name']}"}
        for name in EXPERIMENTS
        if name in experiments
        for row in EXPERIMENTS[name](AttentionRun(settings, device, dtype, note))
    ]


def rows_of(experiment: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["experiment"] == experiment]


# ---- pictures and tables -------------------------------------------------------------------------------------------

COLOURS = {"ragged": "tab:blue", "padded": "tab:orange", "bursted": "tab:green"}
STYLES = (":", "--", "-")  # the more the lengths vary, the more solid


def attention_panels(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """One for each figure that was measured."""
    modes, sharing = rows_of("modes", rows), rows_of("sharing", rows)
    panels = [
        _modes_panel([row for row in modes if row["kind"] == kind])
        for kind in dict.fromkeys(row["kind"] for row in modes)
    ]
    by_tokens = partial(Plot, x="tokens", lines=True, log="xy", colours=("tab:orange", "tab:blue"))
    if tiling := rows_of("tiling", rows):
        for title, unit, factor, key in (("time", "ms", 1e3, "seconds"), ("peak memory", "MiB", 2**-20, "bytes")):
            heights = {"whole score matrix": f"full_{key}", "tiled": f"tiled_{key}"}
            name = f"One prompt: {title}"
            panels.append(by_tokens(title=name, rows=tiling, y=heights, factor=factor, x_label="tokens", y_label=unit))
    if sharing:
        mha = sharing[0]
        relative: dict[str, Value] = {
            "KV bytes per token": lambda row: row["bytes_per_token"] / mha["bytes_per_token"],
            "decode time": lambda row: row["decode_seconds"] / mha["decode_seconds"],
        }
        title, label = "Heads that share keys and values, relative to MHA", "{0[name]}, {0[kv_heads]} KV heads".format
        panels.append(Plot(title=title, rows=sharing, x=lambda row: label(row).removeprefix("sharing: "), y=relative))
    if cache := rows_of("cache", rows):
        title = "Generating: keys and values kept, or computed anew"
        heights = {"computed anew": "recompute_seconds", "kept": "cached_seconds"}
        panels.append(by_tokens(title=title, rows=cache, y=heights, x_label="tokens generated", y_label="seconds"))
    return panels


def _modes_panel(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """A colour for each mode; the more the lengths vary, the more solid its line."""

    def label(mode: str, variation: float) -> str:
        return f"{mode}, lengths vary by {variation:g}"

    variations = sorted({row["variation"] for row in rows})
    styles = {
        label(mode, variation): {"color": COLOURS.get(mode), "linestyle": style, "markersize": 3}
        for mode in rows[0]["seconds"]
        for variation, style in zip(variations, STYLES[-len(variations) :], strict=False)
    }
    cells = [(row, mode) for row in rows for mode in row["seconds"] if label(mode, row["variation"]) in styles]
    return Plot(
        title=f"{rows[0]['kind']}: attention of a layer",
        rows=cells,
        x=lambda cell: cell[0]["batch"],
        y=lambda cell: cell[0]["seconds"][cell[1]],
        series=lambda cell: label(cell[1], cell[0]["variation"]),
        lines=True,
        factor=1e3,
        x_label="requests in the batch",
        y_label="ms",
        log="xy",
        styles=styles,
    )


def _ratio(value: str, of: str, row: Mapping[str, Any]) -> float | None:
    return None if row[value] is None else row[value] / row[of]


@bench(
    "attention",
    "chairlift bench attention",
    "chairlift bench attention --experiments tiling --sizes 1024,4096 --plot tiling.png",
    report=ReportOptions,
)
def bench_attention(
    options: AttentionOptions,
    machine: MachineOptions,
    note: Note,
    experiments: Annotated[str, typer.Option(help="What to measure.")] = "modes,tiling,sharing,cache",
) -> BenchResult:
    """Attention backends, tiling, shared KV heads and the KV cache, each against its alternative.

    modes: one call per request, one padded call, one ragged call.
    tiling: a FlashAttention kernel and the full score matrix.
    sharing: MHA, GQA and MQA.
    cache: keys and values cached, or recomputed for every token.
    """
    settings = AttentionSettings(**asdict(options))
    names = parse_names("experiments", experiments, EXPERIMENTS)
    resolved = machine.resolve()
    rows = run_attention(settings, resolved.device, resolved.dtype, experiments=names, note=note)
    where = {"device": str(resolved.device), "dtype": str(resolved.dtype).removeprefix("torch.")}
    tables = [TABLES[name](rows_of(name, rows)) for name in EXPERIMENTS if name in names]
    panels = attention_panels(rows)
    return BenchResult(asdict(settings) | {"experiments": names} | where, rows, tables, picture("Attention", panels))


def _modes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    first, *others = modes = list(rows[0]["seconds"])

    def cell(row: Mapping[str, Any], mode: str) -> str:
        seconds, reference = row["seconds"][mode], row["seconds"][first]
        return f"{seconds * 1e3:.3f}" + (f" {seconds / reference:5.1f}x" if mode in others else "")

    columns = [
        Column("Batch", "kind"),
        Column("Size", "batch"),
        Column("Spread", "variation", "g"),
        *(Column(f"{mode}\nms", partial(cell, mode=mode)) for mode in modes),
        Column("Padding", lambda row: row["padding"] / (row["tokens"] + row["padding"]), ".0%"),
    ]
    caption = (
        "Spread: standard deviation / mean of the lengths. Padding: share of the tokens that the padded mode "
        "computes in vain, in this layer and in all others"
    )
    return Table("Modes: the attention of one layer", columns, rows, caption)


# The table of each experiment, made of its rows.
TABLES: dict[str, Callable[[Sequence[Mapping[str, Any]]], Table]] = {
    "modes": _modes_table,
    "tiling": partial(
        Table,
        "Tiling: causal attention over one prompt",
        (
            Column("Tokens", "tokens", ","),
            Column("Tiled\nms", "tiled_seconds", ".1f", factor=1e3),
            Column("Whole\nms", "full_seconds", ".1f", factor=1e3, missing="too large"),
            Column("Whole\nis", partial(_ratio, "full_seconds", "tiled_seconds"), ".1f", unit="x", missing=""),
            Column("Tiled\nMiB", "tiled_bytes", ",.1f", factor=2**-20),
            Column("Whole\nMiB", "full_bytes", ",.1f", factor=2**-20),
        ),
        caption="Whole: with the full score matrix. MiB: peak memory besides queries, keys and values",
    ),
    "sharing": partial(
        Table,
        "Sharing: heads with the same keys and values",
        (
            Column("", lambda row: row["name"].removeprefix("sharing: ")),
            Column("KV heads", "kv_heads"),
            Column("Bytes per token\nand layer", "bytes_per_token", ","),
            Column("Decode\nms", "decode_seconds", ".2f", factor=1e3),
            Column("Sequences\nin 1 GiB", "largest_batch", ","),
        ),
    ),
    "cache": partial(
        Table,
        "Cache: generating with and without a KV cache",
        (
            Column("Tokens", "tokens", ","),
            Column("Cached\ns", "cached_seconds", ".3f"),
            Column("Recomputed\ns", "recompute_seconds", ".3f"),
            Column("Recomputed\nis", partial(_ratio, "recompute_seconds", "cached_seconds"), ".1f", unit="x"),
            Column("Computed,\ncached", "cached_tokens", ","),
            Column("Computed,\nrecomputed", "recompute_tokens", ","),
        ),
        caption="A small random model. Computed: tokens that went through the model",
    ),
}
