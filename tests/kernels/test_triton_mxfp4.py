"""Experts in 4-bit floats: the grouped products against float64, and what is kept in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.experts import products, routing
from chairlift.kernels.triton.experts.tiling import ExpertTiling
from chairlift.layers.expert_weights import ExpertWeights, packed, unpacked
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.layers.linear import Build
from chairlift.layers.mlp import ClampedGate
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.routing import Routing
from chairlift.loading.stored_weight import MicroscaledFloats

EXPERTS, HIDDEN, INNER = 5, 128, 64


def stored(rows: int, columns: int, seed: int) -> MicroscaledFloats:
    """Random numbers with every code, and scales from 2 ** -9 to 2 ** 2."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(118, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return MicroscaledFloats(codes, exponents)


def filled(device: torch.device) -> tuple[MixtureOfExperts, list[Tensor], list[Tensor]]:
    """A block in 4 bits, and the values of its weights."""
    block = MixtureOfExperts(
        HIDDEN,
        INNER,
        Routing(num_experts=EXPERTS, top_k=2),
        bias=True,
        activation=ClampedGate(1.702, 7.0),
        build=Build(torch.float32, device, CheckpointWeight),
    )
    inner: list[Tensor] = []
    outer: list[Tensor] = []
    for name, target in block.expert_targets(("gate", "up"), "down"):
        if name.endswith("bias"):
            assert isinstance(target, Tensor)
            target.normal_()
            continue
        weight = stored(*target.shape, seed=len(inner) + len(outer))
        target.copy_(weight)
        (outer if "down" in name else inner).append(weight.dequantized().double())
    return block, [torch.cat(inner[2 * i : 2 * i + 2]) for i in range(EXPERTS)], outer


@pytest.mark.parametrize("tokens", [1, 20])
def test_products(tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.layers.expert_weights.on_gpu", lambda device: True)
    block, inner, outer = filled(device)
    assert block.gate_up.form == block.down.form == "mxfp4"
    # Half a byte per number, and a byte for 32 of them.
    assert block.gate_up.num_bytes == EXPERTS * 2 * INNER * HIDDEN * 17 // 32
    assert block.gate_up_bias is not None
    assert block.down_bias is not None
    torch.manual_seed(tokens)
    x = 0.1 * torch.randn(tokens, HIDDEN, device=device)
    experts = torch.rand(tokens, EXPERTS).topk(2).indices.to(device)
    shares = torch.rand(tokens, 2, device=device)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(experts[token].tolist(), shares[token].double().cpu(), strict=True):
            both = inner[expert] @ x[token].double().cpu() + block.gate_up_bias[expert].double().cpu()
            gate, up = both.chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            out = outer[expert] @ ((up + 1) * gate * (1.702 * gate).sigmoid())
            expected[token] += share * (out + block.down_bias[expert].double().cpu())
    found = block.grouped(x, shares, experts, torch.zeros(tokens, dtype=torch.int32, device=device))
    assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "16 bits"])
def test_every_number_is_multiplied(is_half: bool, device: torch.device) -> None:
    """The product with the identity is the weight itself, bit by bit."""
    dtype = torch.float32
    if is_half:  # the interpreter multiplies no bfloat16
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    weights = ExpertWeights(2, 48, 64, dtype=dtype, device=device, keeps=frozenset({"mxfp4"}))
    each = [stored(48, 64, seed=expert) for expert in range(2)]
    for expert, weight in enumerate(each):
        weights.fill(expert, 0, weight)
    experts = torch.arange(2, device=device).repeat(64, 1)
    tiling = ExpertTiling(16, 32, 32, 2)
    groups = routing.group_by_expert(experts, 2, tiling.rows)
    found = products.grouped_linear(torch.eye(64, dtype=dtype, device=device), weights.matrix, groups, tiling, 2)
    for expert, weight in enumerate(each):  # the result is sorted by expert
        assert found[64 * expert : 64 * (expert + 1)].T.float().cpu().equal(weight.dequantized())


def test_what_is_kept_in_4_bits() -> None:
    kind: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    codes = stored(16, 128, seed=0)
    for columns in (128, 96):  # whole chunks, and a part of one
        weight = stored(32, columns, seed=2)
        again = unpacked(*packed(weight), columns)
        assert again.codes.equal(weight.codes)
        assert again.exponents.equal(weight.exponents)
    plain = ExpertWeights(1, 16, 128, **kind)
    plain.fill(0, 0, codes)
    assert plain.form == "plain"
    assert plain.plain[0].equal(codes.dequantized())
    odd = ExpertWeights(1, 24, 96, **kind, keeps=frozenset({"mxfp4"}))
    odd.fill(0, 0, stored(24, 96, seed=1))
    assert odd.form == "plain", "rows that are not whole panels of 16"
    mixed = ExpertWeights(2, 16, 128, **kind, keeps=frozenset({"mxfp4"}))
    mixed.fill(1, 0, codes)
    assert mixed.form == "mxfp4"
    values = torch.randn(16, 128)
    mixed.fill(0, 0, values)
    assert mixed.form == "plain"
    assert mixed.plain[0].equal(values)
    assert mixed.plain[1].equal(codes.dequantized())
