"""Observes the attention of a layer while the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.runner.base import ModelRunner
from chairlift_lab.explain.recording import Run, TimedRequest, record

if TYPE_CHECKING:
    from chairlift.engine.startup import StartedEngine

T = TypeVar("T")
PUSH = 1e6  # added to a value, so that every row with any weight on it changes


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Inputs and output of one layer in one step."""

    layer: AttentionLayer
    q: Tensor  # [T, heads, head_dim]
    k: Tensor  # [T, kv_heads, head_dim]
    v: Tensor
    output: Tensor  # [T, heads, head_dim]
    layout: RaggedLayout
    storage: KVStorage
    attention: StepAttention


Listener = Callable[[AttentionCall], None]


class _Listening(AttentionBackend):
    """A backend that reports its calls."""

    def __init__(self, inner: AttentionBackend, listener: Listener) -> None:
        super().__init__(inner.invariant_for)
        self.inner = inner
        self.listener = listener
        # A stack in one kernel would not call `attend` layer by layer.
        self.capabilities = replace(inner.capabilities, has_work=False)  # type: ignore[misc]

    def begin(self, batch: StepBatch, storage: KVStorage) -> StepAttention:
        return _ListeningStep(self.inner.begin(batch, storage), batch.layout, storage, self.listener)


@dataclass(frozen=True, slots=True)
class _ListeningStep(StepAttention):
    inner: StepAttention
    layout: RaggedLayout
    storage: KVStorage
    listener: Listener

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        output = self.inner.attend(layer, q, k, v, sinks=sinks)
        self.listener(AttentionCall(layer, q, k, v, output, self.layout, self.storage, self.inner))
        return output


@contextmanager
def listening(started: StartedEngine, listener: Listener) -> Iterator[None]:
    """Call `listener` after every attention layer of a step."""
    runner: Any = started.runner
    assert isinstance(runner, ModelRunner)
    before = runner.attention
    runner.attention = _Listening(before, listener)
    try:
        yield
    finally:
        runner.attention = before


def record_calls(
    started: StartedEngine,
    requests: Sequence[TimedRequest],
    note: Callable[[AttentionCall], T],
    *,
    layer: int | None = None,
) -> tuple[Run, list[T]]:
    """Record a run, and what `note` makes of each call of the attention of a layer, or of all layers."""
    notes: list[T] = []

    def listen(call: AttentionCall) -> None:
        if layer is None or call.layer.index == layer:
            notes.append(note(call))

    with listening(started, listen):
        return record(started.engine, requests), notes


def who_sees_whom(call: AttentionCall) -> list[list[bool]]:
    """Which row attends to which position: [T rows][positions of the first sequence, then of the next, ...].

    Nothing is assumed about masks: every value in the cache is changed in turn, and the rows whose output changes
    attend to it.
    """
    ends = call.layout.ends
    columns = [_who_sees(call, sequence, place) for sequence, end in enumerate(ends) for place in range(end)]
    return torch.stack(columns, dim=1).tolist()


def _who_sees(call: AttentionCall, sequence: int, position: int) -> Tensor:
    """[T] bool: the rows whose output depends on the value of that position of that sequence."""
    layout, storage, index = call.layout, call.storage, call.layer.index
    start = layout.starts[sequence]
    if position >= start:  # computed in this step
        v = call.v.clone()
        v[layout.offsets[sequence] + position - start] += PUSH
        changed = call.attention.attend(call.layer, call.q, call.k, v)
        storage.write(index, layout.slot_mapping, call.k, call.v)
    else:
        block = int(layout.tables[sequence, position // storage.block_size])
        value = storage.values[index][block, position % storage.block_size]
        before = value.clone()
        value += PUSH
        changed = call.attention.attend(call.layer, call.q, call.k, call.v)
        value.copy_(before)
    return (changed - call.output).abs().amax(dim=(1, 2)) > 0
