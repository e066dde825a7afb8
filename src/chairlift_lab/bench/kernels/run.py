"""The speed of single kernels at the shapes of a model: products, attention, norms and sampling.

Each is called for one layer after the other, as in a step, so that weights and keys come from memory and not from a
cache. On a CPU, the attention of all layers is one call, as in a fused step. On a GPU the calls are captured and
replayed, so that the time is that of the GPU and not of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import build_batch
from chairlift.attention.choose import choose_backend
from chairlift.attention.interface import (
    AttentionLayer,
    HostWork,
    LatentProjection,
    PlainProjection,
    Projection,
    StepAttention,
)
from chairlift.attention.paged.cpu import as_array, score_of
from chairlift.attention.paged.gpu import PagedGPUStep
from chairlift.attention.storage import bytes_per_number, narrowed
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.layers.latent_attention import LatentAttention
from chairlift.layers.linear import Linear
from chairlift.layers.mlp import GatedMLP
from chairlift.layers.norm import add_normed_
from chairlift.models.decoder import Decoder
from chairlift.models.self_attention import SelfAttention
from chairlift.progress import Note
from chairlift.runner.kv_storage import allocate_storage
from chairlift.sampling.sampler import Sampler
from chairlift_lab.bench.attention.modes import BLOCK_SIZE, plan_of
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.step_work import KernelWork, attention_work, linear_work
from chairlift_lab.common.timing import TimedCall, best_seconds

KINDS = ("products", "attention", "norms", "sampling")
MOST_CACHE_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}  # for keys and values; limits the number of layers, at least one


@dataclass(frozen=True, slots=True)
class KernelSettings:
    kinds: Sequence[str] = KINDS
    rows: Sequence[int] = (1, 8, 32, 128, 512)
    batches: Sequence[int] = (1, 8, 32)
    contexts: Sequence[int] = (128, 1024, 4096)
    backend: str = "auto"  # of attention

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS or list(self.kinds).count(kind) > 1:
                raise InvalidParameter("kernels", f"{kind!r} is no choice here; name {', '.join(KINDS)} once each")
        for parameter, values in (("rows", self.rows), ("batch", self.batches), ("contexts", self.contexts)):
            if not values or min(values) < 1:
                raise InvalidParameter(parameter, f"needs numbers of at least 1, got {list(values)}")


@dataclass(frozen=True, slots=True)
class KernelPoint:
    kind: str
    name: str
    size: str  # batch size
    seconds: float  # of one call
    work: KernelWork
    floor_seconds: float  # for reading or computing, whichever takes longer
    bandwidth: float  # bytes per second that were measured in the same run

    @property
    def share_of_floor(self) -> float:
        return self.floor_seconds / self.seconds

    @property
    def share_of_bandwidth(self) -> float:
        return self.work.bytes / self.seconds / self.bandwidth

    def row(self) -> dict[str, Any]:
        return {
            "name": f"{self.name}, {self.size}",
            "kind": self.kind,
            "seconds": self.seconds,
            **asdict(self.work),
            "floor_seconds": self.floor_seconds,
            "share_of_floor": self.share_of_floor,
            "bytes_per_second": self.work.bytes / self.seconds,
            "share_of_bandwidth": self.share_of_bandwidth,
            "flops_per_second": self.work.flops / self.seconds,
        }


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`run` makes `calls` calls of a kernel that does `work` each time."""

    name: str
    size: str
    run: TimedCall
    calls: int
    work: KernelWork


@torch.inference_mode()
def measure_kernels(
    model: Decoder,
    kv_dtype: torch.dtype,
    ceilings: Ceilings,
    settings: KernelSettings,
    note: Note = lambda text: None,
) -> list[KernelPoint]:
    cases: dict[str, Callable[[], Iterator[KernelCase]]] = {
        "products": lambda: _products(model, settings.rows),
        "attention": lambda: _attention(model, kv_dtype, settings),
        "norms": lambda: _norms(model, settings.rows),
        "sampling": lambda: _sampling(model, settings.batches),
    }
    points = []
    for kind in settings.kinds:
        for case in cases[kind]():
            note(f"{case.name}, {case.size}")
            seconds = device_seconds(case.run, model.device) / case.calls
            floor = max(
                case.work.bytes / ceilings.bytes_per_second,
                case.work.flops / ceilings.flops_per_second,
            )
            points.append(KernelPoint(kind, case.name, case.size, seconds, case.work, floor, ceilings.bytes_per_second))
    return points


def device_seconds(run: TimedCall, device: torch.device) -> float:
    """The time on the device, without the cost of launching kernels one by one."""
    if device.type != "cuda":
        return best_seconds(run, device)
    run()  # compile
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return best_seconds(graph.replay, device)


def _products(model: Decoder, rows: Sequence[int]) -> Iterator[KernelCase]:
    attentions = [mixer for layer in model.layers for mixer in layer.mixers if isinstance(mixer, SelfAttention)]
    linears: dict[str, list[Linear]] = {}
    if attentions:
        linears["qkv"] = [attention.qkv for attention in attentions]
        linears["output"] = [attention.output for attention in attentions]
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, GatedMLP)]
    if mlps:  # experts are not plain products
        linears |= {"gate, up": [mlp.gate_up for mlp in mlps], "down": [mlp.down for mlp in mlps]}
    linears["head"] = [model.head]
    for name, layers in linears.items():
        first = layers[0]
        for count in rows:
            x = torch.randn(count, first.in_features, device=model.device).to(model.dtype)
            moved = (first.in_features + first.out_features) * count * model.dtype.itemsize
            yield KernelCase(
                f"{name} {first.in_features}→{first.out_features}",
                f"{count} rows",
                _each(layers, x),
                len(layers),
                linear_work(first, count) + KernelWork(bytes=moved),
            )


def _each(layers: Sequence[Linear], x: Tensor) -> TimedCall:
    def run() -> None:
        for layer in layers:
            layer(x)

    return run


def _attention(model: Decoder, kv_dtype: torch.dtype, settings: KernelSettings) -> Iterator[KernelCase]:
    layers = [layer for layer in model.attention_layers if layer.window == model.attention_layers[0].window]
    alike = [layer for layer in layers if layer.head_dim == layers[0].head_dim]
    backend = choose_backend(settings.backend, alike, model.device, model.dtype)
    for context in settings.contexts:
        for batch in settings.batches:
            spans = [(context - 1, 1)] * batch
            yield attention_case(model, alike, kv_dtype, backend, spans, "decode", f"{batch} of {context:,} tokens")
        yield attention_case(model, alike, kv_dtype, backend, [(0, context)], "prompt", f"{context:,} tokens")


def attention_case(
    model: Decoder,
    layers: Sequence[AttentionLayer],
    kv_dtype: torch.dtype,
    backend: AttentionBackend,
    spans: Sequence[tuple[int, int]],
    name: str,
    size: str,
) -> KernelCase:
    plan, num_blocks = plan_of(spans)
    first, device = layers[0], model.device
    kv_itemsize = bytes_per_number(first.head_dim, kv_dtype)
    per_layer = (num_blocks + 1) * BLOCK_SIZE * first.numbers_per_token * kv_itemsize
    count = max(1, min(len(layers), int(MOST_CACHE_BYTES[device.type] / per_layer)))

    def random(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.float32).to(dtype)

    storage = allocate_storage([first] * count, num_blocks, BLOCK_SIZE, kv_dtype, device)
    for tensor in storage.tensors:
        tensor.copy_(narrowed(random(*tensor.shape[:-1], first.head_dim, dtype=torch.float32), kv_dtype))
    batch = build_batch(plan, storage, device, rectangular=backend.capabilities.rectangular)
    attention = _with_tiles_of_a_step(backend.begin(batch, storage), first, model.dtype)
    rows, heads = len(batch.tokens), first.num_heads + 2 * first.num_kv_heads
    which = [replace(first, index=index) for index in range(count)]
    if first.latent_dim is not None:
        run_latent, work = _latent_call(model, which, attention, spans, kv_itemsize)
        return KernelCase(f"attention, {name}", size, run_latent, count, work)
    qkv = random(rows, heads * first.head_dim, dtype=model.dtype)
    q, k, v = qkv.view(rows, heads, -1).split((first.num_heads, first.num_kv_heads, first.num_kv_heads), dim=1)

    projection = Projection(lambda: (q, k, v), lambda: PlainProjection(qkv))
    on_host = attention.work(first)

    def run() -> None:
        if on_host is not None:
            _attend_all_layers(on_host, first, q, k, v)
            return
        for layer in which:  # as it is called in a step
            attention.from_projection(layer, projection)

    work = attention_work(first, spans, kv_itemsize)
    return KernelCase(f"attention, {name}", size, run, count, work + KernelWork(bytes=2.0 * q.nbytes))


def _attend_all_layers(work: HostWork, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run the attention of all layers in one call, as a fused step does."""
    from chairlift.kernels.cpu.threads import the_team  # importing numba takes a while
    from chairlift_lab.bench.kernels.cpu_layers import attend_layers

    assert work.storage.stacked is not None
    the_team().run(
        attend_layers,
        *(side.contiguous().numpy() for side in (q, k, v)),
        work.layout.slot_mapping.numpy(),
        *(as_array(side) for side in work.storage.stacked),
        work.layout.tables.numpy(),
        work.pieces,
        score_of(layer, None),
        np.empty((*q.shape[:2], layer.value_dim), dtype=np.float32),
    )


def _latent_call(
    model: Decoder,
    layers: Sequence[AttentionLayer],
    attention: StepAttention,
    spans: Sequence[tuple[int, int]],
    kv_itemsize: float,
) -> tuple[TimedCall, KernelWork]:
    """Latent attention from its projections, with the matrices of the model's first layer."""
    mixer = next(mixer for layer in model.layers for mixer in layer.mixers if isinstance(mixer, LatentAttention))
    shape, up, rows = mixer.shape, mixer.up, sum(count for _, count in spans)
    kind: dict[str, Any] = {"device": model.device, "dtype": torch.float32}
    q = torch.randn(rows, layers[0].num_heads, shape.nope_dim + shape.rope_dim, **kind).to(model.dtype)
    latent = torch.randn(rows, shape.rank + shape.rope_dim, **kind).to(model.dtype)
    projection = LatentProjection(q, latent, mixer.kv_norm.weight, mixer.kv_norm.eps, None, None, up)

    def run() -> None:
        for layer in layers:
            attention.from_latent(layer, projection)

    counted = layers[0]
    if all(start == 0 and count > 1 for start, count in spans):  # expanded: fewer products per pair of tokens
        values = up.weight.shape[1] - shape.nope_dim
        counted = replace(counted, head_dim=shape.nope_dim + shape.rope_dim, latent_dim=values)
    work = attention_work(counted, spans, kv_itemsize)
    return run, work + KernelWork(2.0 * rows * up.weight.numel(), float(up.weight.nbytes + q.nbytes))


def _with_tiles_of_a_step(attention: StepAttention, layer: AttentionLayer, dtype: torch.dtype) -> StepAttention:
    """Apply the tiles of the GPU runner, which fit the layers and assume one row per request, to a backend's plan."""
    if not isinstance(attention, PagedGPUStep):
        return attention
    batch, queries = attention.batch, attention.backend.batch_spec([layer], dtype).tile_queries
    counts = enumerate(batch.chunk_count.tolist())
    tiles = [(chunk, at) for chunk, count in counts if chunk >= batch.num_single for at in range(0, count, queries)]
    chunks, offsets = (
        torch.tensor([tile[side] for tile in tiles], dtype=torch.int32, device=batch.slots.device) for side in (0, 1)
    )
    return replace(
        attention,
        batch=replace(batch, tile_chunk=chunks, tile_offset=offsets, tile_queries=queries, one_per_request=True),
    )


def _norms(model: Decoder, rows: Sequence[int]) -> Iterator[KernelCase]:
    """Norms with the addition to the residual stream; a decoder whose layers are one kernel has none."""
    norms = [layer.before_mlp for layer in model.layers if layer.before_mlp is not None]
    if model.stack.is_one_kernel or not norms:
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
    from chairlift.kernels.triton.sampling import sample

    rows, device = len(logits), logits.device
    numbers = {
        name: torch.full((rows,), value, dtype=torch.float32, device=device)
        for name, value in (
            ("temperature", params.temperature),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("uniforms", 0.5),
        )
    }
    tokens, last, top_k = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3))
    slots = torch.arange(rows, dtype=torch.int32, device=device)

    def run() -> None:
        sample(logits, tokens=tokens, last_token=last, slots=slots, top_k=top_k, **numbers)

    return run


def _host_sampler(logits: Tensor, params: SamplingParams) -> TimedCall:
    sampler = Sampler(logits.shape[1], logits.device)
    ids = [f"{row}" for row in range(len(logits))]
    for one in ids:
        sampler.add(one, params, [0], seed=0, eos_ids=[])

    def run() -> None:
        # Filters change the logits in place.
        sampler.sample(logits if params.temperature == 0 else logits.clone(), ids, [0] * len(ids))

    return run
