"""`python -m tests.gpu.tune_g2 --out FILE`: time tiles of the products of experts on a GPU.

Every variant is compiled first, in parallel processes; then it is compared with float64, and timed in CUDA graphs over
the weights of several layers. Lines are printed as they come.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

BF16 = torch.bfloat16
BEGUN = time.monotonic()


class Shape(NamedTuple):
    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    form: str
    clamped: bool = False


GPT = Shape("gpt-oss", 32, 4, 2880, 2880, "mxfp4", True)
GPT16 = Shape("gpt-oss-bf16", 32, 4, 2880, 2880, "bf16", True)
GPT8 = Shape("gpt-oss-fp8", 32, 4, 2880, 2880, "fp8", True)
QWEN = Shape("qwen3-30b", 128, 8, 2048, 768, "bf16")
LITE = Shape("dsv2-lite", 64, 6, 2048, 1408, "bf16")
NEXT = Shape("qwen3-next", 512, 10, 2048, 512, "bf16")
CASES: list[tuple[Shape, int]] = [
    (GPT, 1), (GPT, 32), (GPT, 128), (QWEN, 1), (GPT, 256), (LITE, 1), (NEXT, 1), (GPT, 2048), (GPT, 8), (QWEN, 32),
    (GPT16, 1), (GPT16, 2048), (GPT8, 1), (GPT8, 32), (LITE, 32), (QWEN, 128), (NEXT, 32), (QWEN, 8), (LITE, 128),
    (NEXT, 128), (QWEN, 2048), (LITE, 8), (NEXT, 8), (QWEN, 256), (LITE, 256), (NEXT, 256),
]  # fmt: skip


def is_few(shape: Shape, tokens: int) -> bool:
    return tokens <= 8 and tokens * shape.top_k <= 64


def variants(shape: Shape, tokens: int) -> tuple[list[Any], list[Any]]:
    """The tiles of gate and up, and of down."""
    from chairlift.kernels.triton.experts.tiling import ExpertTiling as T

    per_expert = tokens * shape.top_k / shape.experts
    few = is_few(shape, tokens)
    if shape.form == "mxfp4":
        if few:
            inner = [
                T(8, c, 128, st, sp, w)
                for c, w, st, sp in [
                    (64, 2, 4, 1), (64, 2, 6, 1), (64, 2, 3, 1), (64, 2, 4, 2), (64, 4, 4, 1), (128, 2, 4, 1),
                    (128, 4, 3, 1), (128, 4, 5, 1), (128, 4, 4, 2), (128, 2, 4, 2), (32, 1, 6, 1), (64, 1, 4, 1),
                ]
            ]  # fmt: skip
            outer = [
                T(8, c, 128, st, sp, w, p)
                for c, w, st, sp, p in [
                    (64, 2, 4, 1, 0), (64, 2, 4, 2, 0), (64, 2, 4, 2, 3), (64, 2, 4, 3, 3), (64, 2, 4, 4, 3),
                    (32, 2, 4, 1, 3), (32, 1, 6, 2, 3), (64, 4, 4, 2, 3), (64, 4, 6, 2, 3), (32, 2, 6, 2, 6),
                    (64, 2, 6, 2, 6),
                ]
            ]  # fmt: skip
            return (inner, outer) if tokens == 1 else (inner[:8:2] + inner[5:7], outer[1:6])
        if tokens > 1024:
            inner = [
                T(r, c, 128, st, 1, w)
                for r, c, w, st in [
                    (64, 128, 4, 3),
                    (64, 256, 8, 3),
                    (128, 128, 4, 3),
                    (128, 128, 8, 3),
                    (128, 256, 8, 2),
                ]
            ]
            outer = [
                T(r, c, 128, st, 1, w)
                for r, c, w, st in [(64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3)]
            ]
            return inner, outer
        rows = (8, 16) if per_expert <= 4 else (16, 32) if per_expert <= 16 else (32, 64)
        inner = [
            T(r, c, 128, st, 1, w)
            for r in rows
            for c, w, st in [(64, 2, 4), (64, 2, 6), (128, 4, 4), (128, 2, 4), (128, 4, 3), (256, 8, 3), (256, 4, 3)]
            if not (r == 64 and c == 64) and not (r <= 8 and c == 256)
        ]
        outer = [
            T(r, c, 128, st, 1, w, p)
            for r in rows
            for c, w, st, p in [
                (64, 2, 4, 0), (64, 2, 6, 3), (64, 4, 4, 0), (128, 4, 4, 0), (128, 4, 4, 3), (128, 8, 3, 0),
                (128, 2, 4, 0),
            ]
            if not (r == 64 and w == 2)
        ]  # fmt: skip
        return inner, outer
    if few:
        inner = [
            T(16, c, d, st, sp, w)
            for c, d, st, sp, w in [
                (64, 128, 4, 1, 4), (64, 128, 3, 1, 4), (64, 128, 4, 2, 4), (64, 128, 3, 2, 4), (32, 128, 5, 1, 4),
                (32, 128, 5, 2, 4), (32, 256, 3, 1, 4), (32, 128, 6, 1, 2), (64, 64, 5, 2, 4), (32, 128, 4, 4, 4),
                (64, 256, 2, 2, 4), (64, 64, 8, 1, 4),
            ]
        ]  # fmt: skip
        outer = [
            T(16, c, d, st, sp, w, p)
            for c, d, st, sp, w, p in [
                (64, 128, 4, 1, 4, 0), (64, 128, 4, 1, 4, 2), (64, 128, 4, 2, 4, 2), (32, 128, 4, 1, 4, 2),
                (32, 128, 4, 2, 4, 2), (32, 256, 3, 1, 4, 2), (32, 128, 6, 1, 2, 3), (64, 64, 6, 2, 4, 4),
                (16, 256, 3, 1, 4, 2), (32, 128, 4, 2, 4, 0),
            ]
        ]  # fmt: skip
        if shape.form == "fp8" or tokens > 1:
            return inner[:5], outer[:5]
        return inner, outer
    if shape.form == "fp8":
        both = [T(16, 64, 128, 4), T(16, 128, 128, 4), T(16, 64, 256, 3)]
        return both, both
    if tokens > 1024:
        both = [T(64, 128, 64, 4), T(128, 128, 64, 4, 1, 8), T(128, 128, 64, 4), T(64, 256, 64, 3, 1, 8)]
        return both, both
    if per_expert <= 8:
        both = [T(16, 64, 128, 4), T(16, 128, 64, 4), T(16, 64, 64, 6), T(16, 128, 128, 3), T(16, 64, 256, 2)]
        return both, [*both, T(16, 64, 128, 4, 1, 4, 2)]
    both = [T(16, 64, 128, 4), T(32, 128, 64, 4), T(32, 64, 128, 4), T(32, 128, 128, 3), T(64, 128, 64, 4)]
    return both, both


class Layers:
    """Weights of several layers, the routing of a number of tokens in each, and what the products read."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device, count: int) -> None:
        self.shape, self.tokens, self.device, self.count = shape, tokens, device, count
        self.fake = device.type == "cpu"
        self.inner = [self._matrix(2 * shape.inner, shape.hidden, i) for i in range(count)]
        self.outer = [self._matrix(shape.hidden, shape.inner, i + 100) for i in range(count)]
        self.bias = None
        if shape.clamped:
            self.bias = self._random(shape.experts, 2 * shape.inner), self._random(shape.experts, shape.hidden)
        self.router = self._random(shape.experts, shape.hidden, scale=0.02)
        self.x = self._random(tokens, shape.hidden, scale=1.0)
        self.pairs = self._random(tokens * shape.top_k, shape.inner, scale=1.0)
        self.positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.share = torch.rand(tokens * shape.top_k, device=device).to(BF16)
        self.experts = [
            torch.rand(tokens, shape.experts, device=device).topk(shape.top_k).indices.int() for _ in range(count)
        ]
        self.groups: dict[int, list[Any]] = {}

    def _random(self, *sizes: int, scale: float = 0.1) -> Tensor:
        if self.fake and sizes[0] * sizes[1] > 2**22:
            return torch.zeros(1, dtype=BF16).expand(*sizes)
        return torch.empty(*sizes, dtype=BF16, device=self.device).normal_(0, scale)

    def _matrix(self, rows: int, columns: int, seed: int) -> Any:
        from chairlift.kernels.triton.experts.products import ExpertMatrix

        experts, device = self.shape.experts, self.device
        if self.shape.form == "mxfp4":
            chunks = -(-columns // 128)
            sizes = experts, rows // 16, chunks, 16, 32
            if self.fake:
                words = torch.zeros(1, dtype=torch.int16).expand(sizes)
                return ExpertMatrix(words, torch.zeros(1, dtype=torch.int32).expand(experts, chunks, rows))
            words = torch.randint(-(2**15), 2**15, sizes, dtype=torch.int16, device=device)
            exponents = torch.randint(181, 185, (experts, rows, chunks * 4), dtype=torch.uint8, device=device)
            exponents = exponents.view(torch.int32).transpose(1, 2).contiguous()
            return ExpertMatrix(words, exponents)
        if self.fake:
            kind = torch.float8_e4m3fn if self.shape.form == "fp8" else BF16
            numbers = torch.zeros(1, dtype=kind).expand(experts, rows, columns)
            return ExpertMatrix(numbers, torch.ones(experts, rows) if self.shape.form == "fp8" else None)
        numbers = torch.empty(experts, rows, columns, dtype=BF16, device=device).normal_(0, 0.02)
        if self.shape.form == "fp8":
            return ExpertMatrix(
                (numbers * 1000).to(torch.float8_e4m3fn), torch.full((experts, rows), 1e-3, device=device)
            )
        return ExpertMatrix(numbers)

    def values(self, matrix: Any, expert: int, columns: int) -> Tensor:
        if self.shape.form == "mxfp4":
            from chairlift.layers.microscaled import unpacked

            return unpacked(matrix.numbers[expert], matrix.scales[expert], columns).dequantized().double()
        found = matrix.numbers[expert].double()
        return found if matrix.scales is None else found * matrix.scales[expert].double()[:, None]

    def grouped(self, rows: int) -> list[Any]:
        """Pairs sorted in tiles of this many rows, in each layer."""
        if rows not in self.groups:
            from chairlift.kernels.triton.experts.grouping import Grouping, group_by_expert

            pairs = self.tokens * self.shape.top_k
            found = []
            for experts in self.experts:
                if is_few(self.shape, self.tokens):
                    flat = experts.flatten()
                    ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
                    if self.fake:
                        found.append(Grouping(*torch.zeros(4, pairs, **ints)))
                        continue
                    order = flat.argsort(stable=True).int()
                    ids, counts = flat.unique(return_counts=True)
                    ends = counts.cumsum(0)
                    pad = [0] * (pairs - len(ids))
                    found.append(
                        Grouping(
                            order,
                            torch.tensor(ids.tolist() + [-1] * len(pad), **ints),
                            torch.tensor((ends - counts).tolist() + pad, **ints),
                            torch.tensor(ends.tolist() + pad, **ints),
                        )
                    )
                else:
                    found.append(group_by_expert(experts, self.shape.experts, rows, self.positions))
            self.groups[rows] = found
        return self.groups[rows]

    def gate(self) -> Any:
        from chairlift.kernels.triton.experts.products import Gate

        return Gate(1.702, 7.0) if self.shape.clamped else Gate()

    def multiply_inner(self, tiling: Any, layer: int, groups: Any = None, fused: bool = True) -> Tensor:
        from chairlift.kernels.triton import layers
        from chairlift.kernels.triton.experts.activation import clamped_mul
        from chairlift.kernels.triton.experts.products import grouped_linear

        groups = groups or self.grouped(tiling.rows)[layer]
        found = grouped_linear(
            self.x, self.inner[layer], groups, tiling, self.shape.top_k, gate=self.gate() if fused else None,
            bias=None if self.bias is None else self.bias[0],
        )  # fmt: skip
        if fused:
            return found
        return clamped_mul(found, 1.702, 7.0) if self.shape.clamped else layers.silu_mul(found)

    def multiply_outer(self, tiling: Any, layer: int, pairs: Tensor | None = None, groups: Any = None) -> Tensor:
        from chairlift.kernels.triton.experts.products import add_up, grouped_linear

        few = is_few(self.shape, self.tokens)
        found = grouped_linear(
            self.pairs if pairs is None else pairs, self.outer[layer], groups or self.grouped(tiling.rows)[layer],
            tiling, self.shape.top_k, scatter=True, bias=None if self.bias is None else self.bias[1],
            share=self.share, sum_tokens=few,
        )  # fmt: skip
        return found if few else add_up(found, self.shape.top_k)

    def route(self, rows: int) -> Any:
        from chairlift.kernels.triton.experts.few_rows import route_and_group
        from chairlift.kernels.triton.experts.grouping import group_by_expert
        from chairlift.kernels.triton.experts.routing import RouteRule, route
        from chairlift.kernels.triton.products.product import product

        rule = RouteRule(self.shape.top_k, False, True, 1e-20, 1.0, 1, 1, 1)
        if is_few(self.shape, self.tokens):
            return route_and_group(self.x, self.router, None, None, rule, self.positions)
        few = self.tokens <= 256
        logits = product(self.x, self.router)[0] if few else torch.nn.functional.linear(self.x, self.router)
        weights, experts = route(logits, None, BF16, rule)
        return weights, group_by_expert(experts, self.shape.experts, rows, self.positions)

    def layer(self, inner: Any, outer: Any, layer: int, fused: bool = True) -> Tensor:
        """A whole layer, routed by the random experts of this layer; the router's own choice is not used."""
        self.route(inner.rows)
        groups = self.grouped(inner.rows)[layer]
        pairs = self.multiply_inner(inner, layer, groups, fused)
        return self.multiply_outer(outer, layer, pairs, groups)

    def floor(self) -> float:
        """Microseconds in which the touched experts of a layer are read once at 4.2 TB/s."""
        touched = sum(len(experts.unique()) for experts in self.experts) / self.count
        size = sum(
            m.numbers[0].nbytes + (0 if m.scales is None else m.scales[0].nbytes)
            for m in (self.inner[0], self.outer[0])
        )
        return float(touched * size / 4.2e6)

    def expected(self, some: int) -> tuple[Tensor, Tensor]:
        """The activations [some, top_k, inner] and the sums of `pairs` times down [some, hidden] of some tokens."""
        shape = self.shape
        inner = torch.empty(some, shape.top_k, shape.inner, dtype=torch.float64, device=self.device)
        outer = torch.zeros(some, shape.hidden, dtype=torch.float64, device=self.device)
        experts = self.experts[0]
        groups = self.grouped(16)[0]
        place = torch.empty_like(groups.order)
        place[groups.order.long()] = torch.arange(len(place), dtype=torch.int32, device=self.device)
        for token, i in itertools.product(range(some), range(shape.top_k)):
            expert = int(experts[token, i])
            both = self.values(self.inner[0], expert, shape.hidden) @ self.x[token].double()
            if self.bias is not None:
                both += self.bias[0][expert].double()
            gate, up = both.chunk(2)
            if shape.clamped:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
                inner[token, i] = up * gate * (1.702 * gate).sigmoid()
            else:
                inner[token, i] = gate * gate.sigmoid() * up
            pair = token * shape.top_k + i
            out = self.values(self.outer[0], expert, shape.inner) @ self.pairs[int(place[pair])].double()
            if self.bias is not None:
                out += self.bias[1][expert].double()
            outer[token] += out * self.share[pair].double()
        return inner, outer


def say(*words: Any) -> None:
    line = f"{time.monotonic() - BEGUN:6.1f} " + " ".join(str(word) for word in words)
    print(line, flush=True)
    if OUT is not None:
        OUT.write(line + "\n")
        OUT.flush()


OUT: Any = None


def fake_gpu() -> None:
    """Compile for Hopper without running anything."""
    from triton.backends.compiler import GPUTarget

    class Driver:
        utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda name, *binary: (1, 2, 0, 0, 1024),
        )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def launcher_cls(self, source: Any, metadata: Any) -> Any:
            return lambda *arguments: None

    triton.runtime.driver.set_active(Driver())
    from chairlift.kernels.triton import launch

    launch.overlapping = lambda device: {"OVERLAP": True, "launch_pdl": True}
    launch.shared_memory = lambda device: 232_448
    from chairlift.kernels.triton import layers
    from chairlift.kernels.triton.experts import activation, few_rows, grouping, microscaled, products, routing
    from chairlift.kernels.triton.products import product

    for module in (layers, activation, few_rows, grouping, microscaled, products, routing, product):
        module.overlapping = launch.overlapping
    microscaled.has_asm = lambda device: True
    product.reads_ahead = lambda device: True


def jobs() -> list[tuple[Shape, int, str, Any]]:
    found: list[tuple[Shape, int, str, Any]] = []
    seen = set()
    for shape, tokens in CASES:
        inner, outer = variants(shape, tokens)
        # What a kernel is compiled for, of the number of tokens.
        kind = (tokens if is_few(shape, tokens) else "many") if tokens < 1024 else "many"
        for part, tilings in (("inner", inner), ("outer", outer)):
            for tiling in tilings:
                key = shape, kind, part, tiling
                if key not in seen:
                    seen.add(key)
                    found.append((shape, tokens, part, tiling))
        found.append((shape, tokens, "route", inner[0]))
        if not is_few(shape, tokens) and shape.form != "fp8":
            found.append((shape, tokens, "apart", inner[0]))
    return found


def compile_one(job: tuple[Shape, int, str, Any]) -> str | None:
    shape, tokens, part, tiling = job
    try:
        layers = Layers(shape, tokens, torch.device("cpu"), 1)
        if part == "route":
            layers.route(tiling.rows)
        elif part == "outer":
            layers.multiply_outer(tiling, 0)
        else:
            layers.multiply_inner(tiling, 0, fused=part == "inner")
    except Exception as error:
        return f"{shape.name} {tokens} {part} {tuple(tiling)}: {type(error).__name__} {str(error)[:300]}"
    return None


def start_compiler() -> None:
    torch.set_num_threads(1)
    fake_gpu()


def timed(run: Any, count: int, seconds: float = 0.012) -> float:
    """Microseconds of each of `count` calls of run(i), in a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(count):
            run(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(2):
                for i in range(count):
                    run(i)
        best, spent = float("inf"), 0.0
        while spent < seconds:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            graph.replay()
            end.record(stream)
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
            spent += max(took, 1e-4)
            best = min(best, took / (4 * count))
    return best * 1e6


class Broken(Exception):
    """A variant after which the GPU's context cannot be used."""


def measure(
    shape: Shape, tokens: int, device: torch.device, weights: dict[str, Layers], skipped: frozenset[str] = frozenset()
) -> None:
    count = 4
    layers = Layers.__new__(Layers)
    if shape.name not in weights:
        weights.clear()
        torch.cuda.empty_cache()
        weights[shape.name] = Layers(shape, tokens, device, count)
    old = weights[shape.name]
    layers.__dict__.update(old.__dict__)
    layers.tokens, layers.groups = tokens, {}
    layers.x = layers._random(tokens, shape.hidden, scale=1.0)
    layers.pairs = layers._random(tokens * shape.top_k, shape.inner, scale=1.0)
    layers.positions = torch.zeros(tokens, dtype=torch.int32, device=device)
    layers.share = torch.rand(tokens * shape.top_k, device=device).to(BF16)
    layers.experts = [
        torch.rand(tokens, shape.experts, device=device).topk(shape.top_k).indices.int() for _ in range(count)
    ]
    few = is_few(shape, tokens)
    floor = layers.floor()
    some = min(tokens, 2)
    expected_inner, expected_outer = layers.expected(some)
    say(f"== {shape.name} {tokens} tokens: experts read once {floor:.1f} us (gate-up {floor * 2 / 3:.1f})")
    inner, outer = variants(shape, tokens)
    best: dict[str, list[tuple[float, Any]]] = {"inner": [], "outer": []}
    for part, tilings in (("inner", inner), ("outer", outer)):
        for tiling in tilings:
            name = f"{shape.name}/{tokens}/{part}/{tuple(tiling)}"
            if name in skipped:
                continue
            try:
                if part == "inner":
                    found = layers.multiply_inner(tiling, 0)
                    order = layers.grouped(tiling.rows)[0].order.long()
                    by_pair = torch.empty_like(found)
                    by_pair[order] = found
                    got = by_pair.view(tokens, shape.top_k, -1)[:some].double()
                    wanted = expected_inner
                else:
                    got, wanted = layers.multiply_outer(tiling, 0)[:some].double(), expected_outer
                error = float((got - wanted).norm() / wanted.norm())
                took = timed(
                    lambda i: (layers.multiply_inner if part == "inner" else layers.multiply_outer)(tiling, i), count
                )
                best[part].append((took, tiling))
                mark = "" if error < 0.01 else f"   WRONG by {error:.3g}"
                say(f"   {part} {took:8.1f} us {tuple(tiling)}{mark}")
            except Exception as problem:
                say(f"   {part} {tuple(tiling)}: {type(problem).__name__} {str(problem)[:200]}")
                try:
                    torch.cuda.synchronize()
                except Exception:
                    raise Broken(name) from None
        best[part].sort(key=lambda each: each[0])
    say(f"   route and sort {timed(lambda i: layers.route(inner[0].rows), count):.1f} us")
    if not few and shape.form != "fp8":
        tiling = inner[0]
        took = timed(lambda i: layers.multiply_inner(tiling, i, fused=False), count)
        say(f"   inner, activation apart {took:.1f} us {tuple(tiling)}")
    combined = []
    for (_, a), (_, b) in itertools.product(best["inner"][:3], best["outer"]):
        if a.rows == b.rows and sum(one[1] == a for one in combined) < 2:
            took = timed(lambda i: layers.layer(a, b, i), count)  # noqa: B023
            combined.append((took, a, b))
    for took, a, b in sorted(combined, key=lambda each: each[0])[:4]:
        say(f" * layer {took:8.1f} us, {floor / took:4.0%} of floor: {tuple(a)} {tuple(b)}")


def main() -> int:
    global OUT, BEGUN
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit", type=float, default=105.0, help="seconds")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--start", type=int, help="measure from this case on, with what is compiled already")
    parser.add_argument("--begun", type=float)
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--compile-only", type=int, metavar="N", help="compile the first N variants and end")
    options = parser.parse_args()
    OUT = open(options.out, "w" if options.start is None else "a")  # noqa: SIM115
    if options.begun is not None:
        BEGUN = options.begun
    if options.start is None:
        compile_all(options)
    if options.compile_only is not None:
        return 0
    device = torch.device("cuda")
    weights: dict[str, Layers] = {}
    for index, (shape, tokens) in enumerate(CASES):
        if index < (options.start or 0):
            continue
        if time.monotonic() - BEGUN > options.limit - 2:
            say(f"no time for {shape.name} {tokens}")
            continue
        try:
            measure(shape, tokens, device, weights, frozenset(options.skip))
        except Broken as variant:
            say("again in a fresh process, without", variant)
            more = [word for name in (*options.skip, str(variant)) for word in ("--skip", name)]
            line = ["--out", options.out, "--limit", str(options.limit), "--begun", str(BEGUN), "--start", str(index)]
            os.execv(sys.executable, [sys.executable, "-m", "tests.gpu.tune_g2", *line, *more])
        except Exception:
            say(traceback.format_exc()[-600:])
    return 0


def compile_all(options: argparse.Namespace) -> None:
    work = jobs()[: options.compile_only]
    say(f"{len(work)} variants to compile")
    done = 0
    with multiprocessing.get_context("fork").Pool(options.processes, start_compiler) as pool:
        for problem in pool.imap_unordered(compile_one, work):
            done += 1
            if problem:
                say("   not compiled:", problem)
            if time.monotonic() - BEGUN > 0.55 * options.limit:
                say(f"   only {done} variants compiled in time")
                pool.terminate()
                break
    say(f"compiled {done}")


if __name__ == "__main__":
    sys.exit(main())
