"""Mixtures of experts with few tokens: routing and grouping in one kernel, and products with the gate and the sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.experts.few_rows import RowNorm, can_route_few
from chairlift.kernels.triton.experts.routing import NO_EXPERT, Grouping
from chairlift.kernels.triton.experts.tiling import ExpertTiling, ExpertTilings
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build
from chairlift.layers.mlp import ClampedGate
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.routing import ExpertRouter, Routing
from tests.kernels.test_triton_mxfp4 import stored
from tests.kernels.test_triton_routing import RULES

HIDDEN = 300  # more than one split of the router's sum, and not a multiple of its tiles


def experts_of(grouping: Grouping, top_k: int) -> dict[int, set[int]]:
    """The experts of each token by the tiles, each checked to be that expert's only one."""
    order, found, seen = grouping.order.tolist(), dict[int, set[int]](), list[int]()
    for expert, begin, end in zip(*(tensor.tolist() for tensor in grouping[1:]), strict=True):
        if expert == NO_EXPERT.value:
            continue
        seen.append(expert)
        pairs = order[begin:end]
        assert pairs == sorted(pairs)
        for pair in pairs:
            found.setdefault(pair // top_k, set()).add(expert)
    assert seen == sorted(set(seen)), "experts in order, each once"
    return found


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("more", ["", "bias", "float32"])
def test_routing_and_grouping(name: str, tokens: int, more: str, device: torch.device) -> None:
    rule = replace(RULES[name], router_bias=more == "bias", float32=more == "float32")
    torch.manual_seed(tokens)
    dtype = torch.bfloat16 if more == "float32" else torch.float32
    router = ExpertRouter(HIDDEN, rule, Build(dtype, device))
    assert router.linear.weight.plain is not None
    router.linear.weight.plain.normal_(std=0.1)
    for bias in (router.linear.bias, router.correction_bias):
        if bias is not None:
            bias.normal_(std=0.3)
    x = torch.randn(tokens, HIDDEN, device=device).to(dtype)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    positions[1::3] = -1  # padding
    assert can_route_few(tokens, rule.top_k)
    weights, grouping, _ = router.group_few(x, positions)
    expected_weights, expected = router.choose_on_gpu(router.linear(x.to(router._dtype)), dtype)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)
    live = {token: set(expected[token].tolist()) for token in range(tokens) if positions[token] >= 0}
    assert experts_of(grouping, rule.top_k) == live


def test_scores_that_are_not_numbers(device: torch.device) -> None:
    router = ExpertRouter(HIDDEN, RULES["mixtral"], Build(torch.float32, device))
    assert router.linear.weight.plain is not None
    router.linear.weight.plain.zero_()
    x = torch.full((2, HIDDEN), torch.nan, device=device)
    _, grouping, _ = router.group_few(x, torch.zeros(2, dtype=torch.int32, device=device))
    used = [expert for expert in grouping.tile_expert.tolist() if expert != NO_EXPERT.value]
    assert all(0 <= expert < 8 for expert in used)


def expected_of(block: MixtureOfExperts, x: Tensor, gate: ClampedGate | None) -> Tensor:
    """The block in float64, one token and expert after the other, with the weights as they are stored."""
    weights, experts = block.router(x)
    found = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for token in range(len(x)):
        for expert, share in zip(experts[token].tolist(), weights[token].double().cpu(), strict=True):
            row = x[token].double().cpu() * (share if block._weights_inputs else 1.0)
            both = block.gate_up.dequantized(expert).double().cpu() @ row
            if block.gate_up_bias is not None:
                both += block.gate_up_bias[expert].double().cpu()
            if block._has_gates:
                one, up = both.chunk(2)
                inner = torch.nn.functional.silu(one) * up if gate is None else gate(one, up)
            else:
                inner = torch.relu(both).square()
            out = block.down.dequantized(expert).double().cpu() @ inner
            if block.down_bias is not None:
                out += block.down_bias[expert].double().cpu()
            found[token] += out * (1.0 if block._weights_inputs else share)
    return found


KINDS = ["plain", "gpt-oss", "weighted inputs", "no gate", "fp8", "mxfp4"]


def make_block(kind: str, device: torch.device) -> tuple[MixtureOfExperts, ClampedGate | None]:
    gate = ClampedGate(1.702, 0.7) if kind in ("gpt-oss", "mxfp4") else None
    format: type[WeightFormat] = {"fp8": FP8Weight, "mxfp4": CheckpointWeight}.get(kind, PlainWeight)
    block = MixtureOfExperts(
        128,
        64,
        Routing(num_experts=9, top_k=3, normalize=True, weights_inputs=kind == "weighted inputs"),
        bias=gate is not None,
        has_gates=kind != "no gate",
        activation=gate or ("relu2" if kind == "no gate" else "silu"),
        build=Build(torch.float32, device, format),
    )
    assert block.router.linear.weight.plain is not None
    block.router.linear.weight.plain.normal_(std=0.1)
    for number, (name, target) in enumerate(block.expert_targets(("up",) if kind == "no gate" else ("g", "u"), "d")):
        if kind == "mxfp4" and name.endswith("weight"):
            target.copy_(stored(*target.shape, seed=number))
        else:
            target.copy_(torch.randn(target.shape) * 0.1)
    return block, gate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_blocks(kind: str, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.layers.expert_weights.on_gpu", lambda device: True)
    monkeypatch.setattr("chairlift.layers.expert_weights.FP8Weight.obstacles", lambda dtype, device: [])
    torch.manual_seed(tokens)
    block, gate = make_block(kind, device)
    assert block.gate_up.form == {"fp8": "fp8", "mxfp4": "mxfp4"}.get(kind, "plain")
    x = torch.randn(tokens, 128, device=device)
    positions = torch.zeros(tokens, dtype=torch.int32, device=device)
    assert block._has_few_rows(x)
    expected = expected_of(block, x, gate)
    for found in (block.few_rows(x, x, positions), block.grouped(x, *block.router(x), positions)):
        assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-5
    if tokens > 1:  # padding does not change the other rows
        positions[3] = -1
        rows = [row for row in range(tokens) if row != 3]
        found = block.few_rows(x, x, positions)[rows].double().cpu()
        assert float((found - expected[rows]).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["plain", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_splits_norm_and_addition(
    kind: str, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in several parts, of which one may be empty; the norm before the block, and the addition behind it."""
    monkeypatch.setattr("chairlift.layers.expert_weights.on_gpu", lambda device: True)
    tiling = ExpertTiling(16, 32, 64, 2)
    both = ExpertTilings(tiling, tiling._replace(splits=3 if kind == "mxfp4" else 1))
    monkeypatch.setattr("chairlift.kernels.triton.experts.tiling.few_rows_tiling", lambda *what: both)
    torch.manual_seed(tokens)
    block, gate = make_block(kind, device)
    assert block.adds_few_rows(torch.zeros(tokens, 128, device=device))
    x, weight = torch.randn(tokens, 128, device=device), torch.rand(128, device=device)
    normed = x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * weight
    expected = x.double().cpu() + expected_of(block, normed, gate)
    norm = RowNorm(x.square().unflatten(1, (4, -1)).sum(dim=2), weight, 1e-6)
    squares = block.add_few_rows(x, norm, torch.zeros(tokens, dtype=torch.int32, device=device))
    assert float((x.double().cpu() - expected).norm() / expected.norm()) < 1e-5
    torch.testing.assert_close(squares.sum(dim=1), x.square().sum(dim=1))


def test_steps_of_many_rows_and_generic_kernels_do_not_use_it(device: torch.device) -> None:
    from chairlift.kernels.triton.launch import generic_kernels

    block, _ = make_block("plain", device)
    assert block._has_few_rows(torch.zeros(8, 128, device=device))
    assert not block._has_few_rows(torch.zeros(9, 128, device=device))
    assert not can_route_few(8, 8), "8 tokens are chosen for in sequence"
    with generic_kernels():
        assert not block._has_few_rows(torch.zeros(1, 128, device=device))
    block.make_batch_invariant()
    assert not block._has_few_rows(torch.zeros(1, 128, device=device))
