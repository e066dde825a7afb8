"""Attention of long prompts: ours and FlashAttention 3 as vLLM brings it.

    PYTHONPATH=src:VLLM python -m tests.gpu.peers.attention OUT.json

One layer of the Llama-3-8B shape (32 query heads, 8 key heads of 128) in bf16: a whole prompt at once, and its last
8,192 tokens, as chunks are computed. Blocks of the cache are in random order. Some queries are compared with float64
before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.triton.attention import Chunks, Scoring, prefill_attention, queries_per_tile
from chairlift.kernels.triton.hopper_prefill import hopper_prefill_attention
from tests.gpu.peers.timing import Report, Step, error, microseconds

HEADS, KV_HEADS, DIM = 32, 8, 128
LENGTHS = (8192, 32768, 131072)
CHUNK = 8192
PAGES = (16, 128)  # tokens per block; FlashAttention copies blocks of 128 by hardware
LARGEST_ERROR = 0.01


class Prompt(NamedTuple):
    q: Tensor  # [queries, heads, dim]: of the last tokens
    keys: Tensor  # [length, key heads, dim]
    values: Tensor

    @classmethod
    def random(
        cls, length: int, queries: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> Prompt:
        sizes = ((queries, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
        return cls(*(torch.randn(size, dtype=dtype, device=device) for size in sizes))

    @property
    def start(self) -> int:
        return len(self.keys) - len(self.q)


class Pages(NamedTuple):
    keys: Tensor  # [blocks, tokens, key heads, dim]
    values: Tensor
    table: Tensor  # [1, blocks] int32

    @classmethod
    def of(cls, prompt: Prompt, size: int) -> Pages:
        count = len(prompt.keys) // size
        table = torch.randperm(count, device=prompt.q.device)
        sides = []
        for side in (prompt.keys, prompt.values):
            blocks = torch.empty_like(side).view(count, size, *side.shape[1:])
            blocks[table] = side.view(blocks.shape)
            sides.append(blocks)
        return cls(sides[0], sides[1], table.int()[None])


OURS: dict[str, Callable[..., None]] = {
    "small tiles": partial(prefill_attention, deep=False),
    "large tiles": partial(prefill_attention, deep=True),
    "for Hopper": hopper_prefill_attention,
}


def ours(kernel: Callable[..., None], prompt: Prompt, pages: Pages, out: Tensor) -> Step:
    device = prompt.q.device
    _, heads, dim = prompt.q.shape
    queries = queries_per_tile(heads, prompt.keys.shape[1], dim, prompt.q.dtype)
    offsets = torch.arange(0, len(prompt.q), queries, dtype=torch.int32, device=device)

    def number(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    zero, start, count = number(0), number(prompt.start), number(len(prompt.q))
    return lambda: kernel(
        prompt.q,
        pages.keys,
        pages.values,
        out,
        Chunks(pages.table, torch.zeros_like(offsets), offsets, zero, zero, start, count, queries),
        Scoring(dim**-0.5),
    )


def flash(prompt: Prompt, pages: Pages | None, out: Tensor) -> Step:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def bounds(count: int) -> Tensor:
        return torch.tensor([0, count], dtype=torch.int32, device=prompt.q.device)

    length = len(prompt.keys)
    options = {"max_seqlen_q": len(prompt.q), "cu_seqlens_q": bounds(len(prompt.q)), "max_seqlen_k": length,
               "softmax_scale": prompt.q.shape[2] ** -0.5, "causal": True, "out": out, "fa_version": 3}  # fmt: skip
    if pages is None:
        options["cu_seqlens_k"] = bounds(length)
        return lambda: flash_attn_varlen_func(prompt.q, prompt.keys, prompt.values, **options)
    options["seqused_k"], options["block_table"] = bounds(length)[1:].clone(), pages.table
    return lambda: flash_attn_varlen_func(prompt.q, pages.keys, pages.values, **options)


def reference(prompt: Prompt, rows: list[int]) -> Tensor:
    """Attention of some queries in float64."""
    kv_heads, dim = prompt.keys.shape[1:]
    q = prompt.q[rows].double().view(len(rows), kv_heads, -1, dim)
    scores = torch.einsum("qhgd,khd->qhgk", q, prompt.keys.double()) * dim**-0.5
    position = torch.arange(len(prompt.keys), device=q.device)
    last = torch.tensor(rows, device=q.device) + prompt.start
    scores.masked_fill_((position[None] > last[:, None])[:, None, None], float("-inf"))
    return torch.einsum("qhgk,khd->qhgd", scores.softmax(-1), prompt.values.double()).flatten(1, 2)


def variants(prompt: Prompt, out: Tensor) -> dict[str, Step]:
    found: dict[str, Step] = {}
    for page in PAGES:
        pages = Pages.of(prompt, page)
        if page == PAGES[0]:
            for name, kernel in OURS.items():
                found[f"ours, blocks of {page}, {name}"] = ours(kernel, prompt, pages, out)
        try:
            found[f"FA3, blocks of {page}"] = flash(prompt, pages, out)
        except Exception as failure:
            print(f"FA3: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            return found
    return found | {"FA3, contiguous": flash(prompt, None, out)}


def measure(length: int, queries: int, report: Report) -> None:
    prompt = Prompt.random(length, queries, HEADS, KV_HEADS, DIM, torch.bfloat16, torch.device("cuda"))
    out = torch.empty_like(prompt.q)
    rows = [*range(0, queries, queries // 15), queries - 1]
    expected, errors = reference(prompt, rows), {}
    steps = variants(prompt, out)
    for name, step in list(steps.items()):
        try:
            out.fill_(float("nan"))
            step()
            errors[name] = error(out[rows], expected)
        except Exception as failure:
            print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            del steps[name]
    pairs = sum(range(prompt.start + 1, length + 1))
    work = 4 * HEADS * DIM * pairs  # floating-point operations
    repeats = max(1, int(5e12 // work))
    for name, time in microseconds(steps, rounds=3, repeats=repeats).items():
        report.add(tokens=length, queries=queries, variant=name, ms=time / 1000, tflops=work / time / 1e6,
                   error=errors[name], good=errors[name] < LARGEST_ERROR)  # fmt: skip


if __name__ == "__main__":
    figures = Report(Path(sys.argv[1]))
    torch.manual_seed(0)
    for tokens in LENGTHS:
        measure(tokens, CHUNK, figures)
        if tokens > CHUNK:
            measure(tokens, tokens, figures)
        torch.cuda.empty_cache()
