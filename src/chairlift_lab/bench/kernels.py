"""The speed of single kernels at the shapes of a model: products, attention, norms and sampling.

Each is called for one layer after the other, as in a step, so that weights and keys come from memory and not from a
cache. On a CPU, the attention of all layers is one call, as in a fused step. On a GPU the calls are captured and
replayed, so that the time is that of the GPU and not of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import UnsupportedModel
from chairlift.progress import Note
from chairlift.terminal.options import EngineOptions, engine_option_names, refuse_given
from chairlift.terminal.tables import Column, Table
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.kernel_cases import KernelCase, attention_case, device_seconds
from chairlift_lab.common.model_shapes import ShapeOptions, ceilings_line, model_settings
from chairlift_lab.common.timing import TimedCall, in_inference_mode
from chairlift_lab.report.options import Counts, Settings, number_list, parse_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.layers.linear import Linear
    from chairlift.models.decoder import Decoder

KINDS = ("products", "attention", "norms", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings(Settings):
    rows: Annotated[Counts, number_list("Rows of products and norms: tokens per step.")] = (1, 8, 32, 128, 512)
    batch: Annotated[Counts, number_list("Requests, for attention and sampling.")] = (1, 8, 32)
    contexts: Annotated[Counts, number_list("Context length of each request.")] = (128, 1024, 4096)


@in_inference_mode
def measure_kernels(
    model: Decoder,
    kv_dtype: torch.dtype,
    ceilings: Ceilings,
    settings: KernelSettings,
    kinds: Sequence[str] = KINDS,
    backend: str = "auto",
    note: Note = lambda text: None,
) -> list[dict[str, Any]]:
    """A row for each call; `backend` is that of attention."""
    cases: dict[str, Callable[[], Iterator[KernelCase]]] = {
        "products": lambda: _products(model, settings.rows),
        "attention": lambda: _attention(model, kv_dtype, settings, backend),
        "norms": lambda: _norms(model, settings.rows),
        "sampling": lambda: _sampling(model, settings.batch),
    }
    rows = []
    for kind in kinds:
        for case in cases[kind]():
            note(f"{case.name}, {case.size}")
            seconds, work = device_seconds(case.run, model.device) / case.calls, case.work
            floor = max(work.bytes / ceilings.bytes_per_second, work.flops / ceilings.flops_per_second)
            rows.append(
                {
                    "name": f"{case.name}, {case.size}",
                    "kind": kind,
                    "seconds": seconds,  # One call takes so long.
                    **asdict(work),
                    "floor_seconds": floor,  # reading or computing, whichever takes longer
                    "share_of_floor": floor / seconds,
                    "bytes_per_second": work.bytes / seconds,
                    "share_of_bandwidth": work.bytes / seconds / ceilings.bytes_per_second,
                    "flops_per_second": work.flops / seconds,
                }
            )
    return rows


def _products(model: Decoder, rows: Sequence[int]) -> Iterator[KernelCase]:
    import torch

    from chairlift_lab.common.floor import KernelWork, linear_work

    attentions = [layer.self_attention for layer in model.layers if layer.self_attention is not None]
    linears: dict[str, list[Linear]] = {}
    if attentions:
        linears["qkv"] = [attention.qkv for attention in attentions]
        linears["output"] = [attention.output for attention in attentions]
    mlps = [layer.dense for layer in model.layers if layer.dense is not None]
    if mlps and mlps[0].width == 2:  # experts are not plain products
        linears |= {"gate, up": [mlp.first for mlp in mlps], "down": [mlp.down for mlp in mlps]}
    linears["head"] = [model.head]
    for name, layers in linears.items():
        first = layers[0]
        for count in rows:
            x = torch.randn(count, first.in_features, device=model.device).to(model.dtype)

            def run(layers: Sequence[Linear] = layers, x: Tensor = x) -> None:
                for layer in layers:
                    layer(x)

            moved = (first.in_features + first.out_features) * count * model.dtype.itemsize
            work = linear_work(first, count) + KernelWork(bytes=moved)
            yield KernelCase(
                f"{name} {first.in_features}→{first.out_features}", f"{count} rows", run, len(layers), work
            )


def _attention(model: Decoder, kv_dtype: torch.dtype, settings: KernelSettings, name: str) -> Iterator[KernelCase]:
    from chairlift.attention.backends.base import choose_backend

    layers = [layer for layer in model.attention_layers if layer.window == model.attention_layers[0].window]
    alike = [layer for layer in layers if layer.head_dim == layers[0].head_dim]
    backend = choose_backend(name, alike, model.device, model.dtype)
    for context in settings.contexts:
        for batch in settings.batch:
            spans = [(context - 1, 1)] * batch
            yield attention_case(model, alike, kv_dtype, backend, spans, "decode", f"{batch} of {context:,} tokens")
        yield attention_case(model, alike, kv_dtype, backend, [(0, context)], "prompt", f"{context:,} tokens")


def _norms(model: Decoder, rows: Sequence[int]) -> Iterator[KernelCase]:
    """Norms with the addition to the residual stream; a decoder whose layers are one kernel has none."""
    import torch

    from chairlift.layers.norm import add_normed_
    from chairlift_lab.common.floor import KernelWork

    norms = [layer.before_mlp for layer in model.layers if layer.before_mlp is not None]
    if model.program.is_one_kernel or not norms:
        return
    size = len(norms[0].weight)
    for count in rows:
        x, delta = (torch.randn(count, size, device=model.device).to(model.dtype) for _ in range(2))

        def run(x: Tensor = x, delta: Tensor = delta) -> None:
            for norm in norms:
                add_normed_(x, delta, norm)

        # The residual is read and written, the delta read, and the norm written.
        yield KernelCase("add and norm", f"{count} rows", run, len(norms), KernelWork(4.0 * x.numel(), 4.0 * x.nbytes))


def _sampling(model: Decoder, batches: Sequence[int]) -> Iterator[KernelCase]:
    import torch

    from chairlift_lab.common.floor import KernelWork

    for name, params in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("top-p", SamplingParams(temperature=0.8, top_p=0.95)),
    ):
        for batch in batches:
            logits = torch.randn(batch, model.vocab_size, device=model.device)
            if model.device.type == "cuda":
                run = _device_sampler(logits.to(model.dtype), params)
            else:
                run = _host_sampler(logits, params)
            moved = logits.numel() * (model.dtype.itemsize if model.device.type == "cuda" else 4)
            yield KernelCase(f"sampling, {name}", f"{batch} rows", run, 1, KernelWork(bytes=moved))


def _device_sampler(logits: Tensor, params: SamplingParams) -> TimedCall:
    import torch

    from chairlift.kernels.triton.sampling import sample

    rows, device = len(logits), logits.device
    values = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p, "uniforms": 0.5}
    numbers = {name: torch.full((rows,), value, dtype=torch.float32, device=device) for name, value in values.items()}
    tokens, last, top_k = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
    slots = torch.arange(rows, dtype=torch.int32, device=device)

    def run() -> None:
        sample(logits, tokens=tokens, last_token=last, slots=slots, top_k=top_k, **numbers)

    return run


def _host_sampler(logits: Tensor, params: SamplingParams) -> TimedCall:
    from chairlift.sampling.sampler import Sampler

    sampler = Sampler(logits.shape[1], logits.device)
    ids = [f"{row}" for row in range(len(logits))]
    for one in ids:
        sampler.add(one, params, [0], seed=0, eos_ids=[])

    def run() -> None:
        # Filters change the logits in place.
        sampler.sample(logits if params.temperature == 0 else logits.clone(), ids, [0] * len(ids))

    return run


# Engine options that change kernels.
RELEVANT = ("model", "device", "dtype", "quantization", "kv_dtype", "attention", "load_format", "quiet")
COLUMNS = (
    Column("Kernel", lambda row: row["name"].rpartition(", ")[0]),
    Column("Batch", lambda row: row["name"].rpartition(", ")[2]),
    Column("µs", "seconds", ",.1f", factor=1e6),
    Column("Floor µs", "floor_seconds", ",.1f", factor=1e6),
    Column("Of\nfloor", "share_of_floor", ".0%"),
    Column("GB/s", "bytes_per_second", ",.1f", factor=1e-9),
    Column("Of\nread", "share_of_bandwidth", ".0%"),
    Column("GFLOP/s", lambda row: row["flops_per_second"] or None, ",.1f", factor=1e-9, missing=""),
)


@bench(
    "kernels",
    "chairlift bench kernels",
    "chairlift bench kernels --quantization int8 --kernels products --rows 1,8,32",
    "chairlift bench kernels --kernels attention --kv-dtype bfloat16 --batch 32 --contexts 300",
    "chairlift bench kernels --model-config qwen3-0.6b --device cuda --batch 1,64,256 --json result.json",
)
def bench_kernels(
    context: typer.Context,
    engine: EngineOptions,
    shape: ShapeOptions,
    note: Note,
    *,
    kernels: Annotated[str, typer.Option(help="Kinds of kernels, separated by commas.")] = ",".join(KINDS),
    settings: KernelSettings,
) -> BenchResult:
    """Each kernel of a model alone: time, bandwidth and arithmetic, next to the least possible time.

    The floor of a call is its memory traffic over the bandwidth or its
    arithmetic over the peak, whichever is longer, both measured in the same
    run. On a CPU, the call from Python is part of the time, for attention
    once for all layers; what kernels take
    within a step is shown by chairlift profile.
    """
    from chairlift.engine.settings import kv_dtype
    from chairlift.engine.startup import load_model
    from chairlift.models.decoder import Decoder
    from chairlift_lab.common.floor import ceilings_for

    kinds = parse_names("kernels", kernels, KINDS)
    others = [name for name in engine_option_names() if name not in RELEVANT]
    refuse_given(context, others, "has no effect on single kernels")
    with shape.resolve(context, engine) as (path, config, name):
        note("loading")
        model = load_model(path, config, progress=not engine.quiet).model
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{name} runs on the code of transformers, which has no kernels of ours")
        note("measuring the ceilings")
        ceilings = ceilings_for(model)
        rows = measure_kernels(model, kv_dtype(config, model), ceilings, settings, kinds, engine.attention, note)
    asked = {"kernels": kinds} | asdict(settings) | {"attention": engine.attention}
    return BenchResult(
        asked | model_settings(name, model, ceilings),
        rows,
        [Table(name, COLUMNS, rows, ceilings_line(ceilings))],
    )
