"""Where the time of a step goes on a CPU.

The phases of the fused decoder are timed by its kernel, compiled again from the code of `decode_step` with a barrier
that also records the time. So the kernel of normal runs has no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import fmean, median
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.engine.startup import StartedEngine
from chairlift.kernels.cpu import decoder as cpu_decoder
from chairlift.kernels.cpu.compiling import FAST, compiled
from chairlift.kernels.cpu.decoder import Network
from chairlift.kernels.cpu.threads import ROUND, barrier
from chairlift.layers.linear import Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.models.programs import fuse_cpu
from chairlift.progress import Note
from chairlift.runner.base import ModelRunner
from chairlift_lab.common.floor import ATTENTION, GEMM, SAMPLING
from chairlift_lab.profile.step_profile import (
    Batch,
    BatchProfile,
    PartTime,
    ProfileSettings,
    Span,
    TimedStep,
    mean_context,
    mean_work,
    trace_events,
)

REST, PYTHON = "rest of model", "Python"  # PYTHON includes scheduling
_PART_OF = {"product": GEMM, "attention": ATTENTION}  # keyed by the first word of a phase
# The phases of a layer, each followed by a barrier.
FIRST_PIECES = ("norm before attention", "product qkv", "rotate and store", "attention", "merge and round")
NORM_BEFORE_MLP = "norm before MLP"
MLP_PIECES = ("product gate, up", "activation", "product down")
LAST_PIECE = "final norm"
MOST_STAMPS = 1 << 16  # bounds the buffer
_I64 = ir.IntType(64)
_CLOCK = time.CLOCK_MONOTONIC


class PartTimer:
    """Records the timed parts of a model while it runs."""

    def __init__(self, runner: ModelRunner) -> None:
        model = runner.model
        self.spans: list[Span] = []
        self._attention = runner.attention
        self._names = _names_of_products(model)
        self._inside = False  # inside a timed part
        self._layers = len(model.layers) if isinstance(model, Decoder) else 0
        is_one_kernel = isinstance(model, Decoder) and model.program.is_one_kernel
        self._stamps = KernelStamps() if is_one_kernel else None

    @contextmanager
    def on(self) -> Iterator[None]:
        watched: set[type] = set()
        begin = self._attention.begin
        with ExitStack() as stack:

            def watch(owner: Any, method: str, part: str) -> None:
                stack.enter_context(patch.object(owner, method, self._timed(getattr(owner, method), part)))

            def begin_and_watch(batch: StepBatch, storage: KVStorage) -> StepAttention:
                attend = begin(batch, storage)
                if type(attend) not in watched:
                    watched.add(type(attend))
                    watch(type(attend), "attend", ATTENTION)
                return attend

            watch(Linear, "__call__", GEMM)
            watch(MixtureOfExperts, "__call__", GEMM)
            watch(torch.nn.Linear, "forward", GEMM)  # models of the transformers fallback have these
            stack.enter_context(patch.object(self._attention, "begin", begin_and_watch))
            if self._stamps is not None:
                stack.enter_context(self._stamps.on())
            yield

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(owner, *args, **kwargs)
            self._inside = True
            begin = time.perf_counter()
            try:
                return method(owner, *args, **kwargs)
            finally:
                name = ATTENTION if part == ATTENTION else self._names.get(id(owner), "product")
                self.spans.append(Span(name, part, begin, time.perf_counter()))
                self._inside = False

        return run

    def take(self) -> list[Span]:
        """The spans recorded since the last call."""
        spans, self.spans = self.spans, []
        if self._stamps is not None:
            pieces = self._stamps.take(self._layers)
            stamped = [Span(name, _PART_OF.get(name.split()[0], REST), begin, end) for name, begin, end in pieces]
            spans = stamped + spans
        return spans


def _names_of_products(model: CausalLM) -> dict[int, str]:
    if not isinstance(model, Decoder):
        return {}
    names = {id(model.head): "product head"}
    for layer in model.layers:
        for mixer in layer.mixers:
            names |= {id(linear): "product qkv" for linear in mixer.linears()} | {id(mixer.output): "product output"}
        if layer.mixture is not None:
            names[id(layer.mixture)] = "product experts"
        elif layer.dense is not None:
            names |= {id(layer.dense.first): "product gate, up", id(layer.dense.down): "product down"}
    return names


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


def profile_on_cpu(
    started: StartedEngine, settings: ProfileSettings, note: Note
) -> tuple[list[BatchProfile], list[dict[str, Any]]]:
    """Profile each batch size; returns the profiles and the slices of a trace."""
    rng = Random(settings.seed)
    note("compiling the kernel with a clock in it")
    watch = PartTimer(started.runner)
    profiles, spans = [], []
    for size in settings.batches:
        note(f"batch {size}: prompts of {settings.prompt_tokens} tokens")
        batch = Batch(started.engine, size, settings.prompt_tokens, rng)
        with watch.on():
            batch.start()
            note(f"batch {size}: {settings.steps} steps")
            watch.take()
            steps, inner = [], []
            for step in batch.run(settings.steps):
                steps.append(step)
                inner.append(watch.take())
        batch.end()
        profiles.append(_profile(started, size, steps, inner))
        for step, timed in zip(steps, inner, strict=True):
            spans += [*_phases(step), *timed]
    return profiles, trace_events(spans, "engine")


def _profile(
    started: StartedEngine, size: int, steps: Sequence[TimedStep], inner: Sequence[Sequence[Span]]
) -> BatchProfile:
    """Profile from the faster half of the steps: other programs only make steps slower."""
    limit = median(step.seconds for step in steps)
    spans = [span for step, timed in zip(steps, inner, strict=True) if step.seconds <= limit for span in timed]
    steps = [step for step in steps if step.seconds <= limit]
    count = len(steps)
    whole = fmean(step.seconds for step in steps)
    forward = fmean(step.done.timing.forward for step in steps)
    sample = fmean(step.done.timing.sample for step in steps)
    seconds = {GEMM: 0.0, ATTENTION: 0.0}
    pieces: dict[str, float] = {}
    for span in spans:
        pieces[span.name] = pieces.get(span.name, 0.0) + span.seconds / count
        if span.part in seconds:
            seconds[span.part] += span.seconds / count
    seconds[SAMPLING] = sample
    seconds[REST] = forward - seconds[GEMM] - seconds[ATTENTION]
    seconds[PYTHON] = whole - forward - sample
    work = mean_work(started, steps)
    parts = [PartTime(name, value, work.get(name)) for name, value in seconds.items()]
    return BatchProfile(size, mean_context(steps), count, whole, parts, pieces)


def _phases(step: TimedStep) -> Iterator[Span]:
    """The spans of a step and its phases."""
    done = step.done
    details = {"requests": done.requests, "tokens": done.decode_tokens + done.prefill_tokens, "step": done.step}
    yield Span(f"step, {done.requests} requests", PYTHON, step.begin, step.end, details)
    begin = step.begin
    for name, part, seconds in (
        ("schedule", PYTHON, done.schedule_seconds),
        ("build batch", PYTHON, done.timing.build),
        ("model", REST, done.timing.forward),
        ("sample", SAMPLING, done.timing.sample),
        ("apply", PYTHON, done.apply_seconds),
    ):
        end = min(begin + seconds, step.end)
        yield Span(name, part, begin, end)
        begin = end
