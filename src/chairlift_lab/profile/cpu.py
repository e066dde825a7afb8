"""Where the time of a step goes on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.engine.startup import StartedEngine
from chairlift.layers.linear import Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.progress import Note
from chairlift.runner.base import ModelRunner
from chairlift_lab.common.step_work import ATTENTION, GEMM, SAMPLING
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


class PartTimer:
    """Records the timed parts of a model while it runs."""

    def __init__(self, runner: ModelRunner) -> None:
        model = runner.model
        self.spans: list[Span] = []
        self._attention = runner.attention
        self._names = _names_of_products(model)
        self._inside = False  # inside a timed part
        self._stamps: Any = None
        self._layers = len(model.layers) if isinstance(model, Decoder) else 0
        if isinstance(model, Decoder) and model.program.is_one_kernel:
            from chairlift_lab.profile.kernel_stamps import KernelStamps

            self._stamps = KernelStamps()

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
