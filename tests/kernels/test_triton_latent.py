"""Latent attention on a GPU against float64: decodes, chunks with and without a context, splits, padding, 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import PagedLayout
from chairlift.attention.interface import AttentionLayer, LatentProjection
from chairlift.attention.paged.gpu import PagedGPUAttention, PagedGPUStep
from chairlift.attention.storage import KVStorage
from chairlift.kernels.triton.latent import absorbed
from chairlift.layers.latent_attention import HeadUpProjection, LatentShape
from chairlift.layers.linear import Build
from tests.kernels.attention_cases import TOLERANCE, as_ints

CPU, EPS = torch.device("cpu"), 1e-6


@dataclass
class LatentCase:
    """Sequences with `starts` tokens in the cache and `counts` new ones, single tokens first."""

    layer: AttentionLayer
    shape: LatentShape
    up: HeadUpProjection
    q: Tensor
    latent: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    cache: Tensor
    tables: Tensor
    starts: list[int]
    counts: list[int]

    @property
    def rows(self) -> list[int]:
        return [sum(self.counts[:i]) for i in range(len(self.counts))]


def make_case(
    starts: list[int],
    counts: list[int],
    *,
    heads: int = 3,
    rank: int = 32,
    nope: int = 12,
    rope: int = 8,
    value: int = 10,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
    device: torch.device,
) -> LatentCase:
    torch.manual_seed(len(starts))
    shape = LatentShape(None, rank, nope, rope, value, bias=False, interleaved_rope=False)
    layer = AttentionLayer(0, heads, 1, rank + rope, (nope + rope) ** -0.5, latent_dim=rank)
    up = HeadUpProjection(heads, shape, Build(dtype, device))
    up.weight.normal_(std=rank**-0.5)
    total = sum(counts)
    needed = [-(-(start + count) // block_size) for start, count in zip(starts, counts, strict=True)]
    order = torch.randperm(sum(needed) + 2)
    tables = torch.zeros(len(starts), max(needed), dtype=torch.int32)
    for i, blocks in enumerate(needed):
        tables[i, :blocks] = order[sum(needed[:i]) : sum(needed[: i + 1])]
    angles = torch.rand(total, rope // 2, device=device) * 6
    return LatentCase(
        layer,
        shape,
        up,
        torch.randn(total, heads, nope + rope, device=device).to(dtype),
        (torch.randn(total, rank + rope, device=device) * 2).to(dtype),
        (torch.rand(rank, device=device) + 0.5).to(dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        torch.randn(sum(needed) + 3, block_size, 1, rank + rope, device=device).to(cache_dtype or dtype),
        tables.to(device),
        starts,
        counts,
    )


def reference(case: LatentCase) -> Tensor:
    """Keys and values of every head, by the formula, in float64."""
    shape, rank, nope = case.shape, case.shape.rank, case.shape.nope_dim
    latent, q = case.latent.double(), case.q.double()
    normed = latent[:, :rank] / (latent[:, :rank].pow(2).mean(-1, keepdim=True) + EPS).sqrt() * case.norm.double()

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = (side.double().view(-1, *[1] * (x.dim() - 2), shape.rope_dim // 2) for side in (case.cos, case.sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    new = torch.cat((normed, rotated(latent[:, rank:])), dim=-1)
    q = torch.cat((q[..., :nope], rotated(q[..., nope:])), dim=-1)
    out = torch.empty(len(q), case.layer.num_heads, shape.value_dim, dtype=torch.float64)
    weight = case.up.weight.double()
    for i, (start, count, row) in enumerate(zip(case.starts, case.counts, case.rows, strict=True)):
        before = case.cache[case.tables[i].long()].double().flatten(0, 1)[:start, 0]
        rows = torch.cat((before, new[row : row + count]))
        both = torch.einsum("nr,hdr->nhd", rows[:, :rank], weight)
        keys = torch.cat((both[..., :nope], rows[:, None, rank:].expand(-1, len(weight), -1)), dim=-1)
        scores = torch.einsum("qhd,nhd->hqn", q[row : row + count], keys) * case.layer.scale
        seen = torch.arange(start + count)[None, :] <= torch.arange(start, start + count)[:, None]
        weights = scores.masked_fill(~seen.to(scores.device), -torch.inf).softmax(-1)
        out[row : row + count] = torch.einsum("hqn,nhd->qhd", weights, both[..., nope:]).cpu()
    return out


def run(case: LatentCase, *, tile_queries: int = 16, padding: int = 0) -> Tensor:
    """Through the attention backend, with `padding` rows of single tokens behind the real ones."""
    device = case.q.device
    singles = sum(count == 1 for count in case.counts)
    longer = range(singles, len(case.counts))
    tiles = [(i + padding, at) for i in longer for at in range(0, case.counts[i], tile_queries)] + [(-1, 0)]
    tiles = tiles if len(case.counts) > singles else []
    owners = [i for i, count in enumerate(case.counts) for _ in range(count)]
    places = [start + j for start, count in zip(case.starts, case.counts, strict=True) for j in range(count)]

    def padded(values: list[int], fill: int) -> Tensor:
        return as_ints([*values[:singles], *[fill] * padding, *values[singles:]], device)

    def spread(x: Tensor) -> Tensor:
        return torch.cat(
            (x[:singles], torch.full_like(x[:1], torch.nan).repeat(padding, *[1] * (x.dim() - 1)), x[singles:])
        )

    rows = [row + (padding if i >= singles else 0) for i, row in enumerate(case.rows)]
    batch = PagedLayout(
        slots=padded(owners, 0),
        positions=padded(places, -1),
        tables=case.tables,
        chunk_slot=padded(list(range(len(case.counts))), 0),
        chunk_row=padded(rows, 0),
        chunk_start=padded(case.starts, 0),
        chunk_count=padded(case.counts, 0),
        num_single=singles + padding,
        tile_chunk=as_ints([chunk for chunk, _ in tiles], device),
        tile_offset=as_ints([at for _, at in tiles], device),
        tile_queries=tile_queries,
        long_contexts=False,
    )
    cache = case.cache.clone()
    projection = LatentProjection(
        spread(case.q),
        spread(case.latent),
        case.norm,
        EPS,
        spread(case.cos)[:, None],
        spread(case.sin)[:, None],
        case.up,
    )
    step = PagedGPUStep(batch, KVStorage([cache], [cache]), PagedGPUAttention())
    out = step.from_latent(case.layer, projection)
    return torch.cat((out[:singles], out[singles + padding :])).double().cpu()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Reduce the number of programs, which the interpreter runs sequentially."""
    if device.type == "cpu":
        monkeypatch.setattr(absorbed, "PROGRAMS", 2)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("tile_queries", "padding", "few_rows"), [(16, 2, 0), (16, 2, 64), (4, 0, 64)])
def test_decodes_and_chunks(
    tile_queries: int, padding: int, few_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.attention.paged.latent_gpu.FEW_ROWS", few_rows)
    case = make_case([0, 21, 5, 0, 37], [1, 1, 1, 19, 23], device=device)
    assert error(run(case, tile_queries=tile_queries, padding=padding), reference(case)) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 20, "rank": 64, "nope": 24, "rope": 8, "value": 32},  # values wider than keys, padded heads
        {"heads": 1, "rank": 16, "nope": 16, "rope": 16, "value": 16},
        {"heads": 5, "rank": 24, "nope": 6, "rope": 4, "value": 20},  # nothing is a power of two
    ],
    ids=["wide values", "one head", "odd sizes"],
)
def test_sizes(sizes: dict[str, Any], device: torch.device) -> None:
    case = make_case([9, 12], [1, 18], device=device, **sizes)
    assert error(run(case), reference(case)) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("few_programs")
def test_16_bits(device: torch.device) -> None:
    case = make_case([133, 12, 20], [1, 18, 5], dtype=torch.float16, device=device)
    assert error(run(case), reference(case)) < TOLERANCE[torch.float16]


@pytest.mark.usefixtures("few_programs")
def test_a_cache_in_8_bits(device: torch.device) -> None:
    case = make_case([33, 12], [1, 18], dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, device=device)
    assert error(run(case), reference(case)) < 0.05  # the new token of a decode is rounded, too


@pytest.mark.parametrize("splits", [2, 8])
def test_contexts_in_parts(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of one part and of several, whose last is shorter."""
    monkeypatch.setattr(absorbed, "MIN_SPLIT", 16)
    monkeypatch.setattr(absorbed, "latent_splits", lambda rows, heads: splits)
    case = make_case([3, 70, 15, 16, 128], [1] * 5, device=device)
    assert error(run(case, padding=1), reference(case)) < TOLERANCE[torch.float32]


def test_splits_fit_into_the_scratch_memory() -> None:
    for heads in (1, 16, 20, 128, 256):
        scratch = absorbed.LatentScratch(heads, 1, CPU)
        for rows in range(1, 600):
            splits = absorbed.latent_splits(rows, heads)
            assert splits == 1 or rows * splits <= len(scratch.partial)
            assert splits & (splits - 1) == 0


def test_batch_invariance_is_refused() -> None:
    layer = AttentionLayer(0, 4, 1, 40, 1.0, latent_dim=32)
    assert PagedGPUAttention.invariance_obstacles([replace(layer, latent_dim=None)]) == []
    (reason,) = PagedGPUAttention.invariance_obstacles([layer])
    assert "depends on its chunk" in reason
    assert PagedGPUAttention.obstacles([replace(layer, head_dim=1088, latent_dim=1024)], CPU, torch.float32)[-1] == (
        "it takes latents of at most 512 dimensions"
    )
