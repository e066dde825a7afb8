"""The GPU kernels of recurrent layers against float64."""

from __future__ import annotations

import pytest
import torch

from chairlift.kernels.triton.recurrent.convolution import convolve
from chairlift.kernels.triton.recurrent.gates import RawGates, gated_norm, step_gates
from chairlift.kernels.triton.recurrent.recurrence import run_recurrence
from chairlift.layers.recurrent import base
from chairlift.layers.recurrent.base import GatedNorm, GateOrder, RecurrenceRule, RecurrentShape, StepGate
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


@pytest.mark.parametrize("sequential", [True, False], ids=["by token", "by tile"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "wide_decay"), [(1, 2, 16, 24, False), (2, 2, 12, 20, True)]
)
def test_recurrence(
    rule: RecurrenceRule,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    wide_decay: bool,
    sequential: bool,
    device: torch.device,
) -> None:
    batch = make_batch(device)
    case = make_recurrence(
        batch, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim, wide_decay=wide_decay
    )
    expected, states = exact_recurrence(case, rule, batch)
    skip = torch.arange(1.0, heads + 1, device=device)
    found = run_recurrence(*case.inputs, rule, case.state, batch, skip, sequential=sequential)
    end = int(batch.starts[-1])
    expected[:end] += skip.double()[:, None] * case.v[:end].double()
    torch.testing.assert_close(found[:end].double(), expected[:end], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(case.state.double(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_rate", [False, True])
def test_gates_in_the_same_kernel(has_rate: bool, device: torch.device) -> None:
    """Token by token, decays and rates are computed on the way."""
    batch, rule = make_batch(device), RULES["gated delta"]
    found = []
    for in_kernel in (False, True):
        case = make_recurrence(batch, key_heads=1, heads=2, key_dim=16, value_dim=24, wide_decay=False)
        wide = torch.randn(len(batch.write), 6, generator=torch.Generator().manual_seed(0)).to(device)
        bias, log_rate = torch.tensor([0.3, -0.2], device=device), torch.tensor([0.1, -0.4], device=device)
        raw = RawGates(wide[:, 1:3], wide[:, 3:5] if has_rate else None, log_rate, bias, (0.05, 1.0))
        gates = raw if in_kernel else step_gates(raw)
        out = run_recurrence(case.q, case.k, case.v, gates, rule, case.state, batch, None, sequential=True)
        found.append((out[: int(batch.starts[-1])], case.state))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_tiles_of_equal_keys(device: torch.device) -> None:
    """The matrix that a tile inverts is as large as it can be; powers of all of it would lose every digit."""
    batch, rule = make_batch(device), RULES["gated delta"]
    case = make_recurrence(batch, key_heads=1, heads=1, key_dim=16, value_dim=16, wide_decay=False)
    case.k[:], case.decay[:], case.rate[:] = case.k[0], -1e-4, 0.999
    expected, states = exact_recurrence(case, rule, batch)
    found = run_recurrence(*case.inputs, rule, case.state, batch, None, sequential=False)
    end = int(batch.starts[-1])
    torch.testing.assert_close(found[:end].double(), expected[:end], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(case.state.double(), states, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("channels", "width", "bias", "silu"), [(150, 4, True, True), (5, 3, False, False)])
def test_convolution(channels: int, width: int, bias: bool, silu: bool, device: torch.device) -> None:
    torch.manual_seed(width)
    batch = make_batch(device)
    weight = torch.randn(width, channels, device=device)
    biases = torch.randn(channels, device=device) if bias else None
    x = torch.randn(len(batch.write), channels + 6, device=device)[:, 3:-3]  # columns of a wider tensor
    state = torch.randn(SLOTS, width - 1, channels, device=device)
    expected, states = exact_convolution(x, weight, biases, state, batch, silu=silu)
    found = convolve(x, weight, biases, state, batch, silu=silu)
    end = int(batch.starts[-1])
    torch.testing.assert_close(found[:end].double(), expected[:end], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), states, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", [GateOrder(), GateOrder(first=True, scale=0.5), GateOrder(norm=False, scale=3.0)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(order: GateOrder, activation: str, device: torch.device) -> None:
    """As the CPU's, which equals transformers."""
    order = GateOrder(order.norm, order.first, activation, order.scale)  # type: ignore[arg-type]
    layer = GatedNorm(60, 12, 1e-5, order, repeats=5, device=CPU)
    if layer.weight is not None:
        layer.weight.normal_()
    x, gate = torch.randn(3, 60), torch.randn(3, 70)[:, 5:-5]
    weight = None if layer.weight is None else layer.weight.to(device)
    found = gated_norm(x.to(device), gate.to(device), weight, 12, 1e-5, order)
    torch.testing.assert_close(found.cpu(), layer(x, gate), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "limits", "has_rate"), [(1, (0.01, 0.5), False), (1, None, True), (6, None, True)])
def test_step_gates(width: int, limits: tuple[float, float] | None, has_rate: bool, device: torch.device) -> None:
    """As the CPU's, which equals transformers."""
    gate = StepGate(5, width, limits=limits, device=CPU)
    gate.log_rate.normal_()
    gate.bias.normal_(std=8.0)
    x = torch.randn(4, 5 * width + 2)[:, 1:-1]
    rate = torch.randn(4, 5) if has_rate else None
    given = None if rate is None else rate.to(device)
    raw = RawGates(x.to(device), given, gate.log_rate.to(device), gate.bias.to(device), limits or (0.0, torch.inf))
    found = step_gates(raw)
    for actual, expected in zip(found, gate(x, rate), strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_layers(shape: RecurrentShape, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with the GPU's kernels is what it is with the CPU's."""
    x = torch.randn(len(make_batch().write), HIDDEN)
    states = {spec.name: torch.randn(SLOTS, *spec.shape) for spec in shape.states()}
    found, kept = [], []
    for on_gpu, where in ((False, CPU), (True, device)):
        monkeypatch.setattr(base, "on_gpu", lambda device, value=on_gpu: value)
        layer, batch = make_layer(shape, where), make_batch(where)
        own = {name: state.clone().to(where) for name, state in states.items()}
        found.append(layer(x.to(where), batch, own)[: int(batch.starts[-1])].cpu())
        kept.append({name: state.cpu() for name, state in own.items()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    for name in states:
        torch.testing.assert_close(kept[1][name], kept[0][name], rtol=1e-4, atol=1e-4)
