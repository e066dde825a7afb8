"""Times the phases of the fused CPU decoder: its kernel, compiled again with a clock at every barrier.

The measured kernel is compiled from the code of `decode_step`, with the barrier replaced by one that also records the
time. So the kernel of normal runs has no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.kernels.cpu import decoder as cpu_decoder
from chairlift.kernels.cpu.compiling import FAST, compiled
from chairlift.kernels.cpu.decoder import Network
from chairlift.kernels.cpu.threads import ROUND, barrier
from chairlift.models.programs import fuse_cpu

# The phases of a layer, each followed by a barrier.
FIRST_PIECES = ("norm before attention", "product qkv", "rotate and store", "attention", "merge and round")
NORM_BEFORE_MLP = "norm before MLP"
MLP_PIECES = ("product gate, up", "activation", "product down")
LAST_PIECE = "final norm"
MOST_STAMPS = 1 << 16  # bounds the buffer
_I64 = ir.IntType(64)
_CLOCK = time.CLOCK_MONOTONIC


def layer_pieces(net: Network) -> list[str]:
    """The phases of one layer, each of which ends at a barrier."""
    after_attention, after_mlp = (norms.weight.shape[1] > 0 for norms in (net.after_attention, net.after_mlp))
    pieces = [*FIRST_PIECES, *[NORM_BEFORE_MLP] * net.parallel, "product output"]
    pieces += [*["norm after attention"] * after_attention, *[NORM_BEFORE_MLP] * (not net.parallel), *MLP_PIECES]
    return [*pieces, *["norm after MLP"] * after_mlp]


class KernelStamps:
    """Times of the barriers in the last call of the decoder's kernel."""

    def __init__(self) -> None:
        # Start of the call, then the time of each barrier, in nanoseconds of the monotonic clock.
        self._times = np.zeros(MOST_STAMPS, dtype=np.int64)
        self._kernel = _with_clock(self._times.ctypes.data)
        self._network: Network | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time every step of a fused decoder."""
        with patch.object(fuse_cpu, "decode_step", self._timed):
            yield

    def _timed(self, shared: Any, members: int, *arguments: Any) -> None:
        """The kernel with stamps, run by each thread of the team."""
        self._times[0] = self._times[0] or time.monotonic_ns()
        self._network = arguments[0]
        self._kernel(shared, members, *arguments)

    def take(self, layers: int) -> list[tuple[str, float, float]]:
        """Phases of the last call with start and end in seconds."""
        assert self._network is not None, "no step has run"
        names = [*layer_pieces(self._network) * layers, LAST_PIECE]
        times = self._times[: len(names) + 1] * 1e-9
        if not times[-1] or self._times[len(times)]:
            raise RuntimeError("decode_step has other phases than those listed here")
        self._times[: len(times)] = 0
        return list(zip(names, times[:-1].tolist(), times[1:].tolist(), strict=True))


@intrinsic
def _nanoseconds(_: Any) -> Any:
    """Read the monotonic clock."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, _args: Sequence[ir.Value]) -> ir.Value:
        timespec = cgutils.alloca_once(b, ir.ArrayType(_I64, 2))
        signature = ir.FunctionType(ir.IntType(32), [ir.IntType(32), _I64.as_pointer()])
        read = cgutils.get_or_insert_function(b.module, signature, "clock_gettime")
        seconds = b.bitcast(timespec, _I64.as_pointer())
        b.call(read, [ir.Constant(ir.IntType(32), _CLOCK), seconds])
        nanoseconds = b.load(b.gep(seconds, [ir.Constant(_I64, 1)]))
        return b.add(b.mul(b.load(seconds), ir.Constant(_I64, 10**9)), nanoseconds)

    return types.int64(), generate


@intrinsic
def _write_at(_: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], _I64.as_pointer()), "monotonic", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


def _with_clock(address: int) -> Any:
    """The decoder's kernel with barriers that store the time of the n-th barrier at `address` + 8 n."""

    @compiled()
    def stamped_barrier(shared: Any, members: int) -> None:
        barrier(shared, members)
        # Unchanged until this thread reaches the next barrier.
        number = shared[ROUND // 8]
        if number < MOST_STAMPS:
            _write_at(address + 8 * number, _nanoseconds())

    def timed(kernel: FunctionType, **others: Any) -> Any:
        names = kernel.__globals__ | {"barrier": stamped_barrier} | others
        return compiled(FAST)(FunctionType(kernel.__code__, names, kernel.__name__))

    parts = {name: timed(getattr(cpu_decoder, name).py_func) for name in ("store_layer", "_add_product")}
    return timed(cpu_decoder.decode_step.py_func, decode_layer=timed(cpu_decoder.decode_layer.py_func, **parts))
