"""Single calls of kernels at the shapes of a model, above all of attention: what to run, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift_lab.common.timing import TimedCall, best_seconds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.attention.backends.base import AttentionBackend
    from chairlift.attention.batch import StepBatch
    from chairlift.attention.interface import AttentionLayer, HostWork, StepAttention
    from chairlift.models.decoder import Decoder
    from chairlift_lab.common.floor import KernelWork

BLOCK_SIZE = 16
MOST_CACHE_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}  # Keys and values of at least one layer; this limits how many.


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`run` makes `calls` calls of a kernel that does `work` each time."""

    name: str
    size: str
    run: TimedCall
    calls: int
    work: KernelWork


def plan_of(spans: Sequence[tuple[int, int]]) -> tuple[StepPlan, int]:
    """A step that computes `count` tokens after `start` cached ones for each request, and the blocks it takes."""
    chunks, used = [], 0
    for index, (start, count) in enumerate(spans):
        needed = -(-(start + count) // BLOCK_SIZE)
        request = Request(f"{index}", [0] * (start + count), SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunks.append(Chunk(request, start, count, range(used, used + needed), samples=True))
        used += needed
    return StepPlan(0, tuple(chunks)), used


def attention_case(
    model: Decoder,
    layers: Sequence[AttentionLayer],
    kv_dtype: torch.dtype,
    backend: AttentionBackend,
    spans: Sequence[tuple[int, int]],
    name: str,
    size: str,
) -> KernelCase:
    import torch

    from chairlift.attention.batch import build_batch
    from chairlift.attention.interface import PlainProjection, Projection
    from chairlift.attention.storage import bytes_per_number, narrowed
    from chairlift.runner.memory import allocate_storage
    from chairlift_lab.common.floor import KernelWork, attention_work

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
    if backend.capabilities.captures:
        batch = _with_tiles_of_a_step(batch, backend.batch_spec([first], model.dtype).tile_queries)
    attention = backend.begin(batch, storage)
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
        for layer in which:  # A step calls it like this.
            attention.from_projection(layer, projection)

    work = attention_work(first, spans, kv_itemsize)
    return KernelCase(f"attention, {name}", size, run, count, work + KernelWork(bytes=2.0 * q.nbytes))


def _attend_all_layers(work: HostWork, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run the attention of all layers in one call, as a fused step does."""
    import numpy as np

    from chairlift.attention.paged.cpu import as_array, score_of
    from chairlift.kernels.cpu.threads import the_team
    from chairlift_lab.common.cpu_kernels import attend_layers

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
    import torch

    from chairlift.attention.interface import LatentProjection
    from chairlift_lab.common.floor import KernelWork, attention_work

    mixer = next(layer.latent for layer in model.layers if layer.latent is not None)
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


def _with_tiles_of_a_step(batch: StepBatch, queries: int) -> StepBatch:
    """Describe a batch as the GPU runner does: with tiles that fit the layers, and one row per request."""
    from chairlift.attention.paged.gpu import paged_layout

    return replace(batch, paged=replace(paged_layout(batch.layout, queries), one_per_request=True))


def device_seconds(run: TimedCall, device: torch.device) -> float:
    """The time on the device, without the cost of launching kernels one by one."""
    import torch

    if device.type != "cuda":
        return best_seconds(run, device)
    run()  # compile
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return best_seconds(graph.replay, device)
