"""Layers of the Llama-3-8B shape with 4-bit weights and one row, with other tiles for each product.

    python -m tests.gpu.peers.int4_rows OUT.json               # half a minute on an H200 with 16 processors
    python -m tests.gpu.peers.int4_rows OUT.json 32 --offsets  # groups of 32 numbers, with offsets
    TRITON_INTERPRET=1 python -m tests.gpu.peers.int4_rows OUT.json --tiny     # a small shape where there is no GPU

A step is a captured graph of several layers with attention, as the engine launches them. First every product is
compared with float64, then one product after the other gets each of its tiles, the others being the kernels with tensor
cores, then all get their best. A tile that fails is reported and left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.triton.attention import Scoring
from chairlift.kernels.triton.decode import Fresh, Scratch, decode_attention
from chairlift.kernels.triton.int4.matrix import Int4Matrix, dequantized, store
from chairlift.kernels.triton.int4.product import (
    Int4VectorTiling,
    choose_int4_tiling,
    int4_product,
    int4_vector_product,
)
from chairlift.kernels.triton.launch import empty_rows
from tests.gpu.peers.timing import Report, Step, captured, error, microseconds

EPS = 1e-5
LARGEST_ERROR = 0.004
COMPILE_SECONDS = 55  # what is not compiled by then is left out

Tiles = dict[str, Int4VectorTiling | None]  # None: the kernel with tensor cores


class Shape(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    context: int
    layers: int
    dtype: torch.dtype
    group: int = 128
    offsets: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the weights."""
        qkv, attended = (self.heads + 2 * self.kv_heads) * self.dim, self.heads * self.dim
        return {
            "qkv": (qkv, self.hidden),
            "output": (self.hidden, attended),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


LLAMA = Shape(4096, 14336, 32, 8, 128, context=250, layers=6, dtype=torch.bfloat16)  # 675 MB, many times the L2 cache
TINY = Shape(512, 1024, 4, 2, 128, context=20, layers=1, dtype=torch.float16)
NAMES = tuple(LLAMA.matrices)

_WIDE = ((8, 2048, 2, 2), (8, 2048, 2, 1), (8, 1024, 1, 2), (4, 2048, 2, 2), (4, 1024, 1, 2), (16, 2048, 2, 1))
TILINGS: dict[str, list[Int4VectorTiling]] = {
    name: [Int4VectorTiling(*each) for each in tiles]
    for name, tiles in {
        "qkv": (*_WIDE, (16, 1024, 1, 1), (8, 4096, 4, 1), (4, 2048, 2, 1)),
        "output": (*_WIDE, (4, 4096, 4, 1), (8, 4096, 4, 1), (4, 2048, 1, 1)),
        "gate_up": (
            (4, 2048, 2, 2), (4, 2048, 2, 1), (4, 1024, 1, 2), (4, 1024, 1, 1), (8, 1024, 1, 1), (8, 2048, 2, 1),
            (2, 2048, 2, 2), (2, 1024, 1, 2), (4, 4096, 4, 1),
        ),
        "down": (*_WIDE, (4, 2048, 2, 1), (8, 4096, 4, 1), (4, 4096, 4, 1), (2, 2048, 2, 2)),
    }.items()
}  # fmt: skip


def _multiply(
    name: str,
    weight: Int4Matrix,
    tiling: Int4VectorTiling | None,
    x: Tensor,
    *,
    squares: Tensor | None = None,
    add_to: Tensor | None = None,
    norm: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gated = name == "gate_up"
    if tiling is not None:
        return int4_vector_product(
            x, weight, tiling, squares=squares, eps=EPS, gated=gated, add_to=add_to, next_norm=norm
        )
    columns, depth = weight.rows // (2 if gated else 1), weight.columns
    before = choose_int4_tiling(1, columns, depth, gated, weight.group)
    return int4_product(x, weight, squares=squares, eps=EPS, gated=gated, add_to=add_to, next_norm=norm, tiling=before)


def _num_squares(shape: Shape, name: str, tiling: Int4VectorTiling | None) -> int:
    """Partial sums of squares that a product leaves."""
    columns, depth = shape.matrices[name]
    if tiling is not None:
        return columns // tiling.columns
    return -(-columns // choose_int4_tiling(1, columns, depth, False, shape.group).columns)


def _random_matrix(rows: int, columns: int, shape: Shape, device: torch.device) -> Int4Matrix:
    """Numbers of a mean of about zero."""
    numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, columns // shape.group, device=device) + 0.5) * (columns**-0.5 / 4.6)
    scales = scales.to(shape.dtype)
    return store(numbers, scales, -8 * scales if shape.offsets else None, shape.group)


class Layers:
    """Weights, caches and the row of a step."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.weights = [
            {name: _random_matrix(*size, shape, device) for name, size in shape.matrices.items()}
            for _ in range(shape.layers)
        ]
        blocks = -(-(shape.context + 1) // 16)
        cache = (shape.layers, 2, blocks, 16, shape.kv_heads, shape.dim)
        self._caches = torch.randn(cache, device=device).to(shape.dtype)
        self._tables = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        self._slot, self._start, self._count = (
            torch.tensor([each], dtype=torch.int32, device=device) for each in (0, shape.context, 1)
        )
        angles = torch.randn(1, shape.dim // 2, device=device)
        self._fresh = Fresh(None, None, 0.0, angles.cos().to(shape.dtype), angles.sin().to(shape.dtype))
        self._scratch = Scratch(shape.heads, shape.kv_heads, shape.dim, device)
        self._begin = torch.randn(1, shape.hidden, device=device).to(shape.dtype)
        self.norm = (torch.rand(shape.hidden, device=device) + 0.5).to(shape.dtype)
        self._x, self._attended = self._row(shape.hidden), self._row(shape.heads * shape.dim)

    def _row(self, size: int) -> Tensor:
        return empty_rows(1, size, dtype=self.shape.dtype, device=self.device)

    def step(self, tiles: Tiles) -> Tensor:
        x, norm = self._x.copy_(self._begin), self.norm
        scaled: Tensor | None = x * norm
        squares: Tensor | None = torch.zeros(1, _num_squares(self.shape, "down", tiles["down"]), device=self.device)
        assert squares is not None
        squares[:, :1] = x.float().square().sum(1, keepdim=True)
        for weights, (keys, values) in zip(self.weights, self._caches, strict=True):
            assert scaled is not None
            qkv = _multiply("qkv", weights["qkv"], tiles["qkv"], scaled, squares=squares)[0]
            self._attend(qkv, keys, values)
            _, squares, scaled = _multiply(
                "output", weights["output"], tiles["output"], self._attended, add_to=x, norm=norm
            )
            assert scaled is not None
            inner = _multiply("gate_up", weights["gate_up"], tiles["gate_up"], scaled, squares=squares)[0]
            _, squares, scaled = _multiply("down", weights["down"], tiles["down"], inner, add_to=x, norm=norm)
        return x

    def _attend(self, qkv: Tensor, keys: Tensor, values: Tensor) -> None:
        shape = self.shape
        decode_attention(
            qkv.view(1, -1, shape.dim), keys, values, self._attended.view(1, shape.heads, shape.dim),
            tables=self._tables, row_slot=self._slot, row_start=self._start, row_count=self._count,
            scratch=self._scratch, scoring=Scoring(shape.dim**-0.5), fresh=self._fresh,
        )  # fmt: skip

    def checked(self, name: str, tilings: Sequence[Int4VectorTiling | None], report: Report) -> list[Int4VectorTiling]:
        """The tiles whose product is that of float64."""
        weight = self.weights[0][name]
        x = torch.randn(1, weight.columns, device=self.device)
        x[0, ::500] *= 100.0  # like the few large activations of real models
        x = self._row(weight.columns).copy_(x)
        expected = x.double() @ dequantized(weight).double().T
        squares = add_to = norm = None
        if name in ("qkv", "gate_up"):
            producer: str = "down" if name == "qkv" else "output"
            squares = torch.zeros(1, _num_squares(self.shape, producer, None), device=self.device)
            squares[:, :1] = x.float().square().sum(1, keepdim=True)
            expected *= (x.double().square().mean() + EPS).rsqrt()
        else:
            add_to, norm = self._begin, self.norm
            expected += add_to.double()
        if name == "gate_up":
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        good = []
        for tiling in tilings:
            try:
                total = None if add_to is None else add_to.clone()
                out, sums, scaled = _multiply(name, weight, tiling, x, squares=squares, add_to=total, norm=norm)
                found = error(out, expected)
                if sums is not None and scaled is not None and norm is not None:
                    found = max(found, error(scaled, expected * norm.double()))
                    found = max(found, abs(float(sums.double().sum() / out.double().square().sum()) - 1.0))
                is_good = found < LARGEST_ERROR
            except Exception as failure:
                print(f"{name} {_shown(tiling)}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
                continue
            report.add(what="error", product=name, tiling=_shown(tiling), error=found, good=is_good)
            if is_good and tiling is not None:
                good.append(tiling)
        return good


def _shown(tiling: Int4VectorTiling | None) -> str:
    return "tensor cores" if tiling is None else f"{tiling.columns}x{tiling.depth} w{tiling.warps} a{tiling.ahead}"


def _compile(shape: Shape, name: str, tiling: Int4VectorTiling | None, num_squares: int) -> str:
    """Compile the kernel of a product by a launch; returns a failure."""
    device = torch.device("cuda")
    try:
        rows, columns = shape.matrices[name]
        weight = _random_matrix(rows, columns, shape, device)
        x = empty_rows(1, columns, dtype=shape.dtype, device=device).zero_()
        squares = torch.ones(1, num_squares, device=device) if num_squares else None
        total, norm = (torch.zeros(1, rows, dtype=shape.dtype, device=device) for _ in range(2))
        added = {} if num_squares else {"add_to": total, "norm": norm[0]}
        _multiply(name, weight, tiling, x, squares=squares, **added)
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:300]}"
    return ""


def compile_all(shape: Shape) -> dict[str, list[Int4VectorTiling]]:
    """Compile all kernels in as many processes as there are processors; returns the tiles that compiled in time."""
    producers = {"qkv": "down", "gate_up": "output"}
    jobs: dict[Future[str], tuple[str, Int4VectorTiling | None]] = {}
    begin = time.perf_counter()
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
    for name in ("down", "gate_up", "output", "qkv"):  # the longest first
        producer = producers.get(name)
        usual = _num_squares(shape, producer, None) if producer else 0
        for tiling in [None, *TILINGS[name]]:
            jobs[pool.submit(_compile, shape, name, tiling, usual)] = (name, tiling)
        others = {_num_squares(shape, producer, each) for each in TILINGS[producer]} if producer else set()
        for parts in sorted(others - {usual}):  # the kernel with tensor cores behind another one
            jobs[pool.submit(_compile, shape, name, None, parts)] = (name, None)
    done, late = wait(jobs, timeout=COMPILE_SECONDS)
    compiled: dict[str, list[Int4VectorTiling]] = {name: [] for name in NAMES}
    for future, (name, tiling) in jobs.items():
        failure = "not compiled in time" if future in late else str(future.exception() or future.result())
        if failure:
            print(f"{name} {_shown(tiling)}: {failure}", flush=True)
        elif tiling is not None:
            compiled[name].append(tiling)
    for process in list(pool._processes.values()) if late else []:
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    print(f"{len(done)} of {len(jobs)} kernels after {time.perf_counter() - begin:.1f} s", flush=True)
    return compiled


def _times(layers: Layers, variants: dict[str, Tiles], report: Report, **about: str) -> dict[str, float]:
    """Microseconds per layer of each variant that runs, reported."""
    steps: dict[str, Step] = {}
    is_gpu = layers.device.type == "cuda"
    expected: Tensor | None = None
    differences = {}
    for name, tiles in variants.items():
        try:
            found = layers.step(tiles).double()
            expected = found if expected is None else expected
            differences[name] = error(found, expected)
            step = partial(layers.step, tiles)
            if is_gpu:
                torch.cuda.synchronize()
            steps[name] = captured(step) if is_gpu else step
        except Exception as failure:
            print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
    times = microseconds(steps, rounds=7, repeats=30) if is_gpu else dict.fromkeys(steps, float("nan"))
    times = {name: time / layers.shape.layers for name, time in times.items()}
    for name, time_per_layer in times.items():
        report.add(what="layer", **about, variant=name, us_per_layer=time_per_layer, difference=differences[name])
    return times


def measure(shape: Shape, out: Path, device: torch.device, tilings: dict[str, list[Int4VectorTiling]]) -> None:
    report, layers = Report(out), Layers(shape, device)
    today: Tiles = dict.fromkeys(NAMES)
    good = {name: layers.checked(name, [None, *tilings[name]], report) for name in NAMES}
    ranked: dict[str, list[Int4VectorTiling | None]] = {}
    for name in NAMES:
        variants: dict[str, Tiles] = {_shown(None): today}
        variants |= {_shown(each): today | {name: each} for each in good[name]}
        times = _times(layers, variants, report, product=name)
        by_name = {_shown(each): each for each in (None, *good[name])}
        ranked[name] = [by_name[each] for each in sorted(times, key=times.__getitem__)]
    best: Tiles = {name: each[0] for name, each in ranked.items()}
    vectors: Tiles = {name: next((each for each in ranked[name] if each is not None), None) for name in NAMES}
    variants = {"tensor cores": today, "best": best, "best without tensor cores": vectors}
    for name in NAMES:  # the fastest product alone is not the fastest among its neighbours
        if len(ranked[name]) > 1:
            variants[f"best, {name} {_shown(ranked[name][1])}"] = best | {name: ranked[name][1]}
    _times(layers, variants, report, product="all")
    print("best:", {name: _shown(each) for name, each in best.items()}, flush=True)


if __name__ == "__main__":
    is_tiny = "--tiny" in sys.argv
    group = next((int(each) for each in sys.argv[2:] if each.isdecimal()), 128)
    chosen = (TINY if is_tiny else LLAMA)._replace(group=group, offsets="--offsets" in sys.argv)
    has_gpu = torch.cuda.is_available()
    tilings = compile_all(chosen) if has_gpu else {name: tiles[:2] for name, tiles in TILINGS.items()}
    measure(chosen, Path(sys.argv[1]), torch.device("cuda" if has_gpu else "cpu"), tilings)
