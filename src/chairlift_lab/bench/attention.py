"""Attention backends, tiling, shared KV heads and the KV cache, each against its alternative."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.attention.backends import BACKENDS
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.kernel_cases import BLOCK_SIZE, plan_of
from chairlift_lab.common.plot import Plot, Value, picture
from chairlift_lab.common.shape_options import MachineOptions
from chairlift_lab.common.timing import best_seconds, in_inference_mode, peak_bytes
from chairlift_lab.common.workload import SpreadLengths
from chairlift_lab.report.lists import number_list, parse_names
from chairlift_lab.report.options import ReportOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.attention.backends.base import AttentionBackend
    from chairlift.attention.interface import AttentionLayer
    from chairlift.attention.storage import KVStorage
    from chairlift.runner.base import ModelRunner

_LAYER, _BATCH = "Layer", "Batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The layer and the batches; the default layer is that of the default model."""

    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_LAYER)] = 9
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.", rich_help_panel=_LAYER)] = 3
    head_dim: Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=_LAYER)] = 64
    batches: Annotated[Sequence[int], number_list("Requests per batch.", panel=_BATCH)] = (1, 4, 16, 64)
    variations: Annotated[
        Sequence[float],
        number_list("Variation of the lengths in a batch: standard deviation / mean.", kind=float, panel=_BATCH),
    ] = (0.0, 0.5, 1.0)
    context: Annotated[int, typer.Option(help="Mean length of a sequence.", rich_help_panel=_BATCH)] = 512
    prompt: Annotated[int, typer.Option(help="Prompt tokens in a mixed batch.", rich_help_panel=_BATCH)] = 256
    tiling_sizes: Annotated[
        Sequence[int], number_list("Prompt tokens for the tiling experiment.", "--sizes", panel=_BATCH)
    ] = (512, 1024, 2048, 4096, 8192, 16384)
    cache_sizes: Annotated[
        Sequence[int], number_list("Tokens generated with and without a KV cache.", panel=_BATCH)
    ] = (32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "context", "prompt"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidParameter("kv_heads", f"must divide the {self.heads} heads, got {self.kv_heads}")
        for name in ("batches", "variations", "tiling_sizes", "cache_sizes"):
            values, least = getattr(self, name), 0 if name == "variations" else 1
            if not values or min(values) < least:
                raise InvalidParameter(name, f"must be numbers of at least {least}, got {list(values)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings(AttentionOptions):
    """The options, and sizes that the command does not offer."""

    tiling_heads: int = 2  # the score matrix of 16k tokens takes 1 GiB per head
    sharing_heads: int = 32
    sharing_group: int = 4
    sharing_batch: int = 16


LONGEST = 8  # limit of lengths, as a multiple of the mean


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer, its device and dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def layer(self) -> AttentionLayer:
        from chairlift.attention.interface import AttentionLayer

        return AttentionLayer(0, self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    def modes(self) -> list[str]:
        """The backends that support it; the one that the engine would choose comes first."""
        ordered = sorted(BACKENDS.names(), key=lambda name: -BACKENDS.get(name).preference)
        return [name for name in ordered if not self._refuses(name)]

    def _refuses(self, name: str) -> bool:
        try:
            self.backend(name)
        except InvalidParameter:
            return True
        return False

    def backend(self, name: str) -> AttentionBackend:
        from chairlift.attention.backends.base import choose_backend

        return choose_backend(name, [self.layer], self.device, self.dtype)

    def random(self, *sizes: int) -> torch.Tensor:
        import torch

        return torch.randn(*sizes, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class ModesPoint:
    """One batch, computed in each mode."""

    kind: str  # decode: one token per request; mixed: the last request computes a prompt
    batch: int
    variation: float  # Of the context lengths.
    tokens: int  # without padding
    padding: int  # additional tokens of the padded mode
    context: int  # cached positions of all requests
    padded_context: int  # positions that the padded mode reads
    seconds: dict[str, float]  # One layer's attention, by mode.


def compare_modes(
    shape: AttentionShape,
    *,
    batches: Sequence[int],
    variations: Sequence[float],
    context: int,
    prompt: int,
    seed: int = 0,
    note: Note = lambda text: None,
) -> list[ModesPoint]:
    """Decoding batches, and mixed ones in which the last request computes a prompt of `prompt` tokens."""
    points = []
    for kind in ("decode", "mixed"):
        for variation in variations:
            for batch in batches:
                note(f"{kind}, {batch} requests, length variation {variation:g}")
                lengths = SpreadLengths(context, variation, LONGEST * context)
                source = random.Random(f"{seed} {batch} {variation}")
                spans = [(length - 1, 1) for length in (lengths.draw(source) for _ in range(batch))]
                if kind == "mixed":
                    spans[-1] = (0, prompt)
                points.append(_point(shape, kind, variation, spans))
    return points


def _point(shape: AttentionShape, kind: str, variation: float, spans: Sequence[tuple[int, int]]) -> ModesPoint:
    ends = [start + count for start, count in spans]
    tokens = sum(count for _, count in spans)
    return ModesPoint(
        kind=kind,
        batch=len(spans),
        variation=variation,
        tokens=tokens,
        padding=len(spans) * max(count for _, count in spans) - tokens,
        context=sum(ends),
        padded_context=len(spans) * max(ends),
        seconds=time_modes(shape, spans),
    )


def time_modes(shape: AttentionShape, spans: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds per mode for a batch of (start, count): a request with `start` cached tokens that computes `count`."""
    plan, num_blocks = plan_of(spans)
    storage = random_storage(shape, num_blocks)
    return {name: _time_backend(shape, name, plan, storage) for name in shape.modes()}


def random_storage(shape: AttentionShape, num_blocks: int) -> KVStorage:
    from chairlift.attention.storage import KVStorage

    size = (num_blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    return KVStorage([shape.random(*size)], [shape.random(*size)])


def _time_backend(shape: AttentionShape, name: str, plan: StepPlan, storage: KVStorage) -> float:
    from chairlift.attention.batch import build_batch

    backend = shape.backend(name)
    batch = build_batch(plan, storage, shape.device, rectangular=backend.capabilities.rectangular)
    # Planned once for all layers of a model, so planning is not part of a layer's cost.
    attend = backend.begin(batch, storage)
    rows = len(batch.tokens)
    q = shape.random(rows, shape.heads, shape.head_dim)
    k, v = (shape.random(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
    return best_seconds(lambda: attend.attend(shape.layer, q, k, v), shape.device)


KV_MEMORY = 2**30  # The memory in which sequences are to fit.


@dataclass(frozen=True, slots=True)
class TilingPoint:
    """Attention over a prompt of `tokens`, tiled and with the full score matrix (None: too large)."""

    tokens: int
    tiled_seconds: float
    full_seconds: float | None
    tiled_bytes: int | None  # peak, besides the inputs
    full_bytes: int | None


def compare_tiling(shape: AttentionShape, *, sizes: Sequence[int], note: Note = lambda text: None) -> list[TilingPoint]:
    """Causal attention of one sequence: torch's FlashAttention-style kernel and the plain formula."""
    import torch.nn.functional as F

    from chairlift.runner.memory import free_memory

    points = []
    for size in sizes:
        note(f"tiled and materialised, {size} tokens")
        q, k, v = (shape.random(1, shape.heads, size, shape.head_dim) for _ in range(3))

        def tiled(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def full(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return materialised(q, k, v)

        matrices = 3 * shape.heads * size**2 * shape.dtype.itemsize  # scores, masked scores, weights: at most
        fits = matrices < 0.9 * free_memory(shape.device)
        points.append(
            TilingPoint(
                size,
                best_seconds(tiled, shape.device, repeats=3),
                best_seconds(full, shape.device, repeats=3) if fits else None,
                peak_bytes(tiled, shape.device),
                peak_bytes(full, shape.device) if fits else None,
            )
        )
    return points


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d, masked)·v with every score in memory. All [1, heads, tokens, d]."""
    import torch

    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    attended: Tensor = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ v
    return attended


@dataclass(frozen=True, slots=True)
class SharingPoint:
    """A decoding batch in which `kv_heads` serve all query heads."""

    name: str  # MHA, GQA, MQA
    kv_heads: int
    bytes_per_token: int  # keys and values of one layer
    decode_seconds: float
    largest_batch: int  # sequences of this context that fit in KV_MEMORY


def compare_head_sharing(
    shape: AttentionShape, *, group: int, batch: int, context: int, note: Note = lambda text: None
) -> list[SharingPoint]:
    """MHA, GQA with `group` query heads per KV head, and MQA."""
    from chairlift.engine.memory_plan import bytes_per_token, plan_memory

    points = []
    for name, kv_heads in (("MHA", shape.heads), ("GQA", shape.heads // group), ("MQA", 1)):
        note(f"{name}, {batch} requests of {context} tokens")
        one = replace(shape, kv_heads=kv_heads)
        seconds = time_modes(one, [(context - 1, 1)] * batch)
        memory = plan_memory(
            [one.layer],
            weight_bytes=0,
            kv_memory=KV_MEMORY,
            dtype=one.dtype,
            device=one.device,
            block_size=BLOCK_SIZE,
            max_model_len=context,
            max_batch_requests=1,
        )
        points.append(
            SharingPoint(
                name=name,
                kv_heads=kv_heads,
                bytes_per_token=bytes_per_token([one.layer], one.dtype),
                decode_seconds=seconds[one.modes()[0]],
                largest_batch=memory.num_blocks // -(-context // BLOCK_SIZE),
            )
        )
    return points


@dataclass(frozen=True, slots=True)
class RecomputePoint:
    """The cost of generating `tokens` tokens."""

    tokens: int
    cached_seconds: float
    recompute_seconds: float
    cached_tokens: int  # computed by the model
    recompute_tokens: int


def compare_recompute(
    device: torch.device, dtype: torch.dtype, *, sizes: Sequence[int], note: Note = lambda text: None
) -> list[RecomputePoint]:
    """One long generation each way; a point is its time up to that many tokens."""
    if not sizes or min(sizes) < 1:
        raise InvalidParameter("cache_sizes", f"must be numbers of tokens of at least 1, got {list(sizes)}")
    longest = max(sizes)
    runner = _runner(device, dtype, longest)
    note(f"{longest} tokens with a KV cache")
    cached = list(accumulate(_seconds_per_step(runner, [(i, 1) for i in range(longest)])))
    note(f"{longest} tokens without a KV cache")
    anew = list(accumulate(_seconds_per_step(runner, [(0, i + 1) for i in range(longest)])))
    return [RecomputePoint(n, cached[n - 1], anew[n - 1], n, n * (n + 1) // 2) for n in sorted(sizes)]


def _runner(device: torch.device, dtype: torch.dtype, longest: int) -> ModelRunner:
    from chairlift.attention.backends.base import choose_backend
    from chairlift.engine.memory_plan import plan_memory
    from chairlift.runner.cpu import CPURunner
    from chairlift.runner.memory import allocate_storage
    from chairlift_lab.common.model_shapes import random_llama

    model = random_llama(device, dtype)
    layers = model.attention_layers
    memory = plan_memory(
        layers,
        weight_bytes=0,
        kv_memory=None,
        dtype=dtype,
        device=device,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_batch_requests=1,
    )
    attention = choose_backend("auto", layers, device, dtype)
    storage = allocate_storage(layers, memory.num_blocks, BLOCK_SIZE, dtype, device)
    runner = CPURunner(model, attention, storage)
    runner.warm_up()
    return runner


def _seconds_per_step(runner: ModelRunner, spans: Sequence[tuple[int, int]]) -> list[float]:
    """Each step computes (start, count) tokens of one sequence and samples a token, as generating does."""
    longest = max(start + count for start, count in spans)
    table = range(-(-longest // BLOCK_SIZE))
    request = Request("only", [0] * longest, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    seconds = []
    for step, (start, count) in enumerate(spans):
        begun = time.perf_counter()
        runner.run(StepPlan(step, (Chunk(request, start, count, table, samples=True),)))
        seconds.append(time.perf_counter() - begun)
    runner.forget(request.id)
    return seconds


EXPERIMENTS = ("modes", "tiling", "sharing", "cache")


@dataclass(slots=True)
class AttentionResults:
    """The points of each experiment; empty for those that were not run."""

    modes: list[ModesPoint] = field(default_factory=list)
    tiling: list[TilingPoint] = field(default_factory=list)
    sharing: list[SharingPoint] = field(default_factory=list)
    cache: list[RecomputePoint] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the JSON report."""
        return [
            *(
                _row("modes", f"{point.kind}, {point.batch} requests, variation {point.variation:g}", point)
                for point in self.modes
            ),
            *(_row("tiling", f"{point.tokens} tokens", point) for point in self.tiling),
            *(_row("sharing", point.name, point) for point in self.sharing),
            *(_row("cache", f"{point.tokens} tokens", point) for point in self.cache),
        ]


def _row(experiment: str, name: str, point: Any) -> dict[str, Any]:
    values: Mapping[str, Any] = asdict(point)
    return {"experiment": experiment} | dict(values) | {"name": f"{experiment}: {name}"}


@in_inference_mode
def run_attention(
    settings: AttentionSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experiments: Sequence[str] = EXPERIMENTS,
    note: Note = lambda text: None,
) -> AttentionResults:
    shape = AttentionShape(settings.heads, settings.kv_heads, settings.head_dim, device, dtype)
    results = AttentionResults()
    if "modes" in experiments:
        results.modes = compare_modes(
            shape,
            batches=settings.batches,
            variations=settings.variations,
            context=settings.context,
            prompt=settings.prompt,
            note=note,
        )
    if "tiling" in experiments:
        plain = AttentionShape(settings.tiling_heads, settings.tiling_heads, settings.head_dim, device, dtype)
        results.tiling = compare_tiling(plain, sizes=settings.tiling_sizes, note=note)
    if "sharing" in experiments:
        wide = AttentionShape(settings.sharing_heads, settings.sharing_heads, settings.head_dim, device, dtype)
        results.sharing = compare_head_sharing(
            wide, group=settings.sharing_group, batch=settings.sharing_batch, context=settings.context, note=note
        )
    if "cache" in experiments:
        results.cache = compare_recompute(device, dtype, sizes=settings.cache_sizes, note=note)
    return results


COLOURS = {"ragged": "tab:blue", "padded": "tab:orange", "bursted": "tab:green"}
STYLES = (":", "--", "-")  # the more the lengths vary, the more solid


def attention_panels(results: AttentionResults) -> list[Plot]:
    """One for each figure that was measured."""
    panels: list[Plot] = [
        _modes_panel([point for point in results.modes if point.kind == kind])
        for kind in dict.fromkeys(point.kind for point in results.modes)
    ]
    by_tokens: dict[str, Any] = {
        "x": lambda point: point.tokens,
        "lines": True,
        "log": "xy",
        "colours": ("tab:orange", "tab:blue"),
    }
    if results.tiling:
        time = {"whole score matrix": lambda point: point.full_seconds, "tiled": lambda point: point.tiled_seconds}
        memory = {"whole score matrix": lambda point: point.full_bytes, "tiled": lambda point: point.tiled_bytes}
        for title, unit, factor, y in (("time", "ms", 1e3, time), ("peak memory", "MiB", 2**-20, memory)):
            name = f"One prompt: {title}"
            rows = results.tiling
            panels.append(Plot(title=name, rows=rows, y=y, factor=factor, x_label="tokens", y_label=unit, **by_tokens))
    if results.sharing:
        mha = results.sharing[0]
        relative: dict[str, Value] = {
            "KV bytes per token": lambda point: point.bytes_per_token / mha.bytes_per_token,
            "decode time": lambda point: point.decode_seconds / mha.decode_seconds,
        }
        title = "Heads that share keys and values, relative to MHA"
        panels.append(
            Plot(title=title, rows=results.sharing, x=lambda each: f"{each.name}, {each.kv_heads} KV heads", y=relative)
        )
    if results.cache:
        seconds = {
            "computed anew": lambda point: point.recompute_seconds,
            "kept": lambda point: point.cached_seconds,
        }
        title, labels = "Generating: keys and values kept, or computed anew", ("tokens generated", "seconds")
        x_label, y_label = labels
        panels.append(Plot(title=title, rows=results.cache, y=seconds, x_label=x_label, y_label=y_label, **by_tokens))
    return panels


def _modes_panel(points: Sequence[ModesPoint]) -> Plot:
    """A colour for each mode; the more the lengths vary, the more solid its line."""

    def label(mode: str, variation: float) -> str:
        return f"{mode}, lengths vary by {variation:g}"

    variations = sorted({point.variation for point in points})
    styles = {
        label(mode, variation): {"color": COLOURS.get(mode), "linestyle": style, "markersize": 3}
        for mode in points[0].seconds
        for variation, style in zip(variations, STYLES[-len(variations) :], strict=False)
    }
    rows = [(point, mode) for point in points for mode in point.seconds]
    return Plot(
        title=f"{points[0].kind}: attention of a layer",
        rows=[(point, mode) for point, mode in rows if label(mode, point.variation) in styles],
        x=lambda row: row[0].batch,
        y=lambda row: row[0].seconds[row[1]],
        series=lambda row: label(row[1], row[0].variation),
        lines=True,
        factor=1e3,
        x_label="requests in the batch",
        y_label="ms",
        log="xy",
        styles=styles,
    )


TILING = (
    Column("Tokens", "tokens", ","),
    Column("Tiled\nms", "tiled_seconds", ".1f", factor=1e3),
    Column("Whole\nms", "full_seconds", ".1f", factor=1e3, missing="too large"),
    Column("Whole\nis", lambda row: _ratio(row["full_seconds"], row["tiled_seconds"]), ".1f", unit="x", missing=""),
    Column("Tiled\nMiB", "tiled_bytes", ",.1f", factor=2**-20),
    Column("Whole\nMiB", "full_bytes", ",.1f", factor=2**-20),
)
SHARING = (
    Column("", lambda row: row["name"].removeprefix("sharing: ")),
    Column("KV heads", "kv_heads"),
    Column("Bytes per token\nand layer", "bytes_per_token", ","),
    Column("Decode\nms", "decode_seconds", ".2f", factor=1e3),
    Column("Sequences\nin 1 GiB", "largest_batch", ","),
)
CACHE = (
    Column("Tokens", "tokens", ","),
    Column("Cached\ns", "cached_seconds", ".3f"),
    Column("Recomputed\ns", "recompute_seconds", ".3f"),
    Column("Recomputed\nis", lambda row: _ratio(row["recompute_seconds"], row["cached_seconds"]), ".1f", unit="x"),
    Column("Computed,\ncached", "cached_tokens", ","),
    Column("Computed,\nrecomputed", "recompute_tokens", ","),
)


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
    chosen = parse_names("experiments", experiments, EXPERIMENTS)
    resolved = machine.resolve()
    on, precision = resolved.device, resolved.dtype
    results = run_attention(settings, on, precision, experiments=chosen, note=note)
    where = {"device": str(on), "dtype": str(precision).removeprefix("torch.")}
    return BenchResult(
        asdict(settings) | {"experiments": chosen} | where,
        results.rows(),
        list(attention_tables(results)),
        picture("Attention", attention_panels(results)),
    )


def attention_tables(results: AttentionResults) -> Iterator[Table]:
    """A table for each experiment that was run."""
    rows = results.rows()

    def of(experiment: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["experiment"] == experiment]

    if results.modes:
        yield _modes_table(of("modes"), list(results.modes[0].seconds))
    if results.tiling:
        caption = "Whole: with the full score matrix. MiB: peak memory besides queries, keys and values"
        yield Table("Tiling: causal attention over one prompt", TILING, of("tiling"), caption)
    if results.sharing:
        yield Table("Sharing: heads with the same keys and values", SHARING, of("sharing"))
    if results.cache:
        caption = "A small random model. Computed: tokens that went through the model"
        yield Table("Cache: generating with and without a KV cache", CACHE, of("cache"), caption)


def _modes_table(rows: list[dict[str, Any]], modes: list[str]) -> Table:
    def cell(row: dict[str, Any], mode: str) -> str:
        seconds, first = row["seconds"][mode], row["seconds"][modes[0]]
        return f"{seconds * 1e3:.3f}" + ("" if mode == modes[0] else f" {seconds / first:5.1f}x")

    columns = [
        Column("Batch", "kind"),
        Column("Size", "batch"),
        Column("Spread", "variation", "g"),
        *(Column(f"{mode}\nms", lambda row, mode=mode: cell(row, mode)) for mode in modes),  # type: ignore[misc]
        Column("Padding", lambda row: row["padding"] / (row["tokens"] + row["padding"]), ".0%"),
    ]
    caption = (
        "Spread: standard deviation / mean of the lengths. Padding: share of the tokens that the padded mode "
        "computes in vain, in this layer and in all others"
    )
    return Table("Modes: the attention of one layer", columns, rows, caption)


def _ratio(value: float | None, of: float) -> float | None:
    return None if value is None else value / of
