"""The four products of a Llama-3-8B layer with 64 to 256 rows: ours, cuBLAS's and those of DeepGEMM (sgl-deep-gemm).

    python -m tests.gpu.peers.products compile            # all kernels, in as many processes as there are processors
    python -m tests.gpu.peers.products bf16 OUT.json
    python -m tests.gpu.peers.products fp8 OUT.json

A step is a captured graph of eight layers with norms, gates and additions, without attention. Every variant is compared
with one layer in float64 before. A variant that fails is reported and left out; those named after OUT.json are not
tried.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.triton.launch import empty_rows
from chairlift.layers.formats.base import ALONE, Fusion, FusionPart, Product, WeightFormat
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build, Linear
from chairlift.layers.mlp import DenseMLP, GatedMLP
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import Norm, RMSNorm
from chairlift.models.programs.streams import BlockNorms, FusedStream, RoundedStream, Stream
from tests.gpu.peers.grouped_rows import GroupedRows, round_blocks, round_groups
from tests.gpu.peers.timing import Report, Step, captured, error, microseconds

HIDDEN, INNER, QKV = 4096, 14336, 6144
SHAPES = {"qkv": (QKV, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
LAYERS = 8  # 3.5 GB in bf16, 1.7 GB in 8 bits: nothing is left in the L2 cache when a layer is read again
ROWS = (64, 256, 128, 192, 96)
LARGEST_ERROR = {"bf16": 0.01, "fp8": 0.08}
BF16 = torch.bfloat16


@cache
def deep_gemm() -> ModuleType:
    _load_nvrtc()
    import deep_gemm as found

    found.set_pdl(True)
    return found


def _load_nvrtc() -> None:
    """DeepGEMM's library needs it, and torch loads it late."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    paths = [*packages.glob("*/lib/libnvrtc.so.1?"), Path("/usr/local/cuda/lib64/libnvrtc.so.13")]
    for path in paths:
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return


class CuBLASWeight(PlainWeight):
    """Norms, gates and additions are kernels of their own."""

    def fuses(self, part: FusionPart, rows: int) -> bool:
        return False


class DeepGEMMWeight(CuBLASWeight):
    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        if not fusion.is_alone:
            return super().product(x, fusion)
        assert self.plain is not None
        out = empty_rows(len(x), self.out_features, dtype=x.dtype, device=x.device)
        deep_gemm().bf16_gemm_nt(x, self.plain, out, compiled_dims="nk")
        return Product(out)


class OursOrDeepGEMMWeight(DeepGEMMWeight):
    """DeepGEMM only where we have cuBLAS."""

    def fuses(self, part: FusionPart, rows: int) -> bool:
        return PlainWeight.fuses(self, part, rows)


class CuBLASFP8Weight(FP8Weight):
    """As with more than 256 rows: `torch._scaled_mm`."""

    def fuses(self, part: FusionPart, rows: int) -> bool:
        return False


class DeepGEMMFP8Weight(PlainWeight):
    def pack(self) -> None:
        assert self.plain is not None
        self.blocks, self.plain = round_blocks(self.plain), None

    def product(self, x: Tensor, fusion: Fusion = ALONE) -> Product:
        return Product(self.times(round_groups(x)))

    def times(self, rows: GroupedRows) -> Tensor:
        count, device = len(rows.numbers), rows.numbers.device
        out = empty_rows(count, self.out_features, dtype=self.dtype, device=device)
        deep_gemm().fp8_gemm_nt(tuple(rows), self.blocks, out, recipe=(1, 128, 128), compiled_dims="nk")
        return out


class GroupedStream(RoundedStream):
    """`RoundedStream` with a scale per 128 columns."""

    def product(self, norm: Norm | None, linear: Linear) -> Tensor:
        return _grouped(linear).times(self._normed_groups(norm))

    def add(self, linear: Linear, y: Tensor, norms: BlockNorms, experts: MixtureOfExperts | None = None) -> None:
        self._delta = _grouped(linear).times(round_groups(y))

    def add_dense(self, mlp: DenseMLP, norms: BlockNorms, beside: Tensor | None = None) -> None:
        gate_up = _grouped(mlp.first).times(self._normed_groups(norms.before))
        self._delta = _grouped(mlp.down).times(round_groups(gate_up, gated=True))

    def _normed_groups(self, norm: Norm | None) -> GroupedRows:
        assert norm is not None
        delta, self._delta = self._delta, None
        return round_groups(self.x, norm_eps=norm.eps, delta=delta)


def _grouped(linear: Linear) -> DeepGEMMFP8Weight:
    assert isinstance(linear.weight, DeepGEMMFP8Weight)
    return linear.weight


class Inputs(NamedTuple):
    start: Tensor  # [rows, hidden]: the residual stream at the begin
    squares: Tensor  # [rows, 1]: sums of squares of its rows
    attended: Tensor  # [rows, hidden]: what attention returns, the same in all layers
    x: Tensor  # the residual stream

    @classmethod
    def random(cls, rows: int, hidden: int, device: torch.device, dtype: torch.dtype = BF16) -> Inputs:
        start, attended, x = (empty_rows(rows, hidden, dtype=dtype, device=device) for _ in range(3))
        start.normal_()
        return cls(start, start.float().square().sum(1, keepdim=True), attended.normal_(), x)


class Kind(NamedTuple):
    format: type[WeightFormat]
    stream: Callable[[Inputs], Stream]


def _fused(inputs: Inputs) -> Stream:
    return FusedStream(inputs.x, inputs.squares)


VARIANTS: dict[str, dict[str, Kind]] = {
    "bf16": {
        "ours": Kind(PlainWeight, _fused),
        "cuBLAS": Kind(CuBLASWeight, _fused),
        "DeepGEMM": Kind(DeepGEMMWeight, _fused),
        "ours, DeepGEMM for cuBLAS": Kind(OursOrDeepGEMMWeight, _fused),
    },
    "fp8": {
        "ours": Kind(FP8Weight, lambda inputs: RoundedStream(inputs.x)),
        "cuBLAS": Kind(CuBLASFP8Weight, lambda inputs: RoundedStream(inputs.x)),
        "DeepGEMM": Kind(DeepGEMMFP8Weight, lambda inputs: GroupedStream(inputs.x)),
    },
}


class Layers:
    """Layers of one variant; the weights of norms are one, since ours are part of the matrices."""

    def __init__(self, weights: list[dict[str, Tensor]], kind: Kind) -> None:
        self._kind = kind
        self._layers = [_layer(each, kind.format) for each in weights]
        output = weights[0]["output"]
        self._norm = RMSNorm(len(output), 1e-5, Build(output.dtype, output.device))
        self._norm.weight.fill_(1.0)

    def run(self, inputs: Inputs, count: int | None = None) -> tuple[Tensor, Stream]:
        """Run the first `count` layers; returns the last product of queries, keys and values, and the stream."""
        inputs.x.copy_(inputs.start)
        stream = self._kind.stream(inputs)
        norms = BlockNorms(self._norm, None, self._norm)
        for qkv, output, mlp in self._layers[:count]:
            found = stream.product(self._norm, qkv)
            stream.add(output, inputs.attended, norms)
            stream.add_dense(mlp, norms)
        return found, stream

    def errors(self, inputs: Inputs, weights: dict[str, Tensor]) -> tuple[float, float]:
        """Of the first product, and of what the first layer adds, beside float64."""
        qkv, stream = self.run(inputs, 1)
        start = inputs.start.double()
        expected_qkv, expected = _reference(weights, start, inputs.attended.double())
        return error(qkv, expected_qkv), error(stream.copy().double() - start, expected - start)


def _layer(weights: dict[str, Tensor], format: type[WeightFormat]) -> tuple[Linear, Linear, GatedMLP]:
    linears = {name: Linear(weight, format=format) for name, weight in weights.items()}
    for linear in linears.values():
        linear.finalize()
    mlp = GatedMLP(16, 16, Build(BF16, torch.device("meta")), activation="silu")
    mlp.first, mlp.down = linears["gate_up"], linears["down"]
    return linears["qkv"], linears["output"], mlp


def _reference(weights: dict[str, Tensor], x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    def normed(rows: Tensor) -> Tensor:
        return rows * (rows.square().mean(1, keepdim=True) + 1e-5).rsqrt()

    def times(rows: Tensor, name: str) -> Tensor:
        return rows @ weights[name].double().T

    qkv = times(normed(x), "qkv")
    x = x + times(attended, "output")
    gate, up = times(normed(x), "gate_up").chunk(2, dim=1)
    return qkv, x + times(F.silu(gate) * up, "down")


def measure(kind: str, out: Path, device: torch.device, left_out: Sequence[str] = ()) -> None:
    torch.manual_seed(0)
    weights = [
        {name: torch.empty(shape, dtype=BF16, device=device).normal_(std=0.02) for name, shape in SHAPES.items()}
        for _ in range(LAYERS)
    ]
    report = Report(out)
    variants = {name: Layers(weights, each) for name, each in VARIANTS[kind].items() if name not in left_out}
    for rows in sorted(ROWS):
        inputs = Inputs.random(rows, HIDDEN, device)
        steps: dict[str, Step] = {}
        errors = {}
        for name, layers in list(variants.items()):
            try:
                errors[name] = layers.errors(inputs, weights[0])
                layers.run(inputs)
                torch.cuda.synchronize()
                steps[name] = captured(partial(layers.run, inputs))
            except Exception as failure:
                print(f"{kind} {rows} rows {name}: {type(failure).__name__}: {str(failure)[:400]}", flush=True)
                del variants[name]
        for name, time in microseconds(steps, rounds=7, repeats=20).items():
            qkv_error, layer_error = errors[name]
            good = max(qkv_error, layer_error) < LARGEST_ERROR[kind]
            report.add(kind=kind, rows=rows, variant=name, us_per_layer=time / LAYERS, qkv_error=qkv_error,
                       layer_error=layer_error, good=good)  # fmt: skip


def compile_product(kind: str, name: str, rows: int) -> str:
    """Compile the kernel of DeepGEMM for one product, or our kernels of a layer; returns a failure."""
    device = torch.device("cuda")
    try:
        if name == "ours":
            weights = {each: torch.zeros(shape, dtype=BF16, device=device) for each, shape in SHAPES.items()}
            Layers([weights], VARIANTS[kind][name]).run(Inputs.random(rows, HIDDEN, device))
        else:
            linear = Linear(torch.zeros(SHAPES[name], dtype=BF16, device=device), format=VARIANTS[kind]["DeepGEMM"][0])
            linear.finalize()
            linear(torch.zeros(rows, SHAPES[name][1], dtype=BF16, device=device))
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:300]}"
    return ""


def compile_all() -> None:
    """Two numbers of rows first: the others have some of their kernels."""
    first, rest = ROWS[:2], ROWS[2:]
    jobs = [(kind, name, rows) for rows in first for kind in VARIANTS for name in SHAPES]
    jobs += [(kind, "ours", rows) for rows in ROWS for kind in VARIANTS]
    jobs += [(kind, name, rows) for rows in rest for kind in VARIANTS for name in SHAPES]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        failures = Counter(pool.map(compile_product, *zip(*jobs, strict=True)))
    for failure, count in failures.items():
        print(f"{count} of {len(jobs)} products: {failure or 'compiled'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        measure(sys.argv[1], Path(sys.argv[2]), torch.device("cuda"), sys.argv[3:])
