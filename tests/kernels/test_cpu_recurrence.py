"""The CPU kernels of recurrent layers against float64."""

from __future__ import annotations

import pytest
import torch

from chairlift.attention.recurrent import NO_SLOT, RecurrentBatch
from chairlift.layers.recurrent.base import CausalConvolution, LinearRecurrence, RecurrenceRule, RecurrentShape
from tests.kernels.recurrent_cases import (
    CPU,
    HIDDEN,
    SHAPES,
    SLOTS,
    exact_convolution,
    exact_recurrence,
    make_batch,
    make_layer,
    make_recurrence,
)

RULES = {
    "gated delta": RecurrenceRule(delta=True, normalize=True, scale=0.3),
    "state space": RecurrenceRule(delta=False),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "wide_decay"),
    [(2, 4, 16, 40, False), (1, 3, 7, 5, False), (2, 2, 24, 64, True)],
)
def test_recurrence(
    rule: RecurrenceRule, key_heads: int, heads: int, key_dim: int, value_dim: int, wide_decay: bool
) -> None:
    batch = make_batch()
    case = make_recurrence(
        batch, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim, wide_decay=wide_decay
    )
    expected, states = exact_recurrence(case, rule, batch)
    skip = torch.arange(1.0, heads + 1)
    found = LinearRecurrence(rule)(*case.inputs, case.state, batch, skip)
    end = int(batch.starts[-1])
    expected[:end] += skip.double()[:, None] * case.v[:end].double()
    torch.testing.assert_close(found[:end].double(), expected[:end], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(case.state.double(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_do_not_change_a_bit(shape: RecurrentShape, size: int) -> None:
    """A prompt in pieces gives the same numbers, and the same state."""
    rows, layer = 80, make_layer(shape)
    for part in layer.parts():
        part.make_batch_invariant()
    states = {spec.name: torch.full((SLOTS, *spec.shape), torch.nan) for spec in shape.states()}
    x = torch.randn(rows, HIDDEN)
    expected = layer(x, _one_sequence(rows, NO_SLOT), states)
    final = {name: state[0].clone() for name, state in states.items()}
    parts = [x[start : start + size] for start in range(0, rows, size)]
    found = [layer(part, _one_sequence(len(part), 0 if i else NO_SLOT), states) for i, part in enumerate(parts)]
    assert torch.equal(torch.cat(found), expected)
    for name, state in states.items():
        assert torch.equal(state[0], final[name])


def _one_sequence(rows: int, read: int) -> RecurrentBatch:
    write = torch.full((rows,), NO_SLOT, dtype=torch.int32)
    write[-1] = 0
    starts, reads = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, rows], [read]))
    return RecurrentBatch(starts, reads, write, longest=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "width", "bias", "silu"), [(300, 4, True, True), (5, 3, False, False)])
def test_convolution(channels: int, width: int, bias: bool, silu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    batch = make_batch()
    layer = CausalConvolution(channels, width, bias=bias, silu=silu, device=CPU)
    for _, target in layer.targets(["conv"]):
        target.copy_(torch.randn(target.shape))
    assert next(target.shape for _, target in layer.targets(["conv"])) == (channels, 1, width)
    x = torch.randn(len(batch.write), channels + 6).to(dtype)[:, 3:-3]  # columns of a wider tensor
    state = torch.randn(SLOTS, width - 1, channels)
    expected, states = exact_convolution(x, layer.weight, layer.bias, state, batch, silu=silu)
    found = layer(x, batch, state)
    end = int(batch.starts[-1])
    torch.testing.assert_close(found[:end].double(), expected[:end], rtol=1e-5, atol=1e-5)
    assert not found[end:].any()
    torch.testing.assert_close(state.double(), states, rtol=1e-6, atol=1e-6)
