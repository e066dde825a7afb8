"""The grouped products of a mixture of experts against float64, on random routings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.kernels import triton_moe
from chairlift.layers.moe import MixtureOfExperts


def routing(kind: str, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """[tokens, top_k]: no token has an expert twice."""
    scores = torch.rand(tokens, num_experts)
    if kind == "skewed":  # most experts get nothing
        scores[:, :top_k] += 1.0
    if kind == "last":
        scores += torch.arange(num_experts)
    return scores.topk(top_k, dim=-1).indices


@pytest.mark.parametrize("kind", ["random", "skewed", "last"])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (37, 5, 3), (50, 9, 1)])
def test_grouping(kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    """Every pair is in exactly one tile, which is its expert's."""
    experts = routing(kind, tokens, num_experts, top_k)
    grouping = triton_moe.group_by_expert(experts.to(device), num_experts, 16)
    order = grouping.order.tolist()
    assert order == experts.flatten().argsort(stable=True).tolist()
    covered = []
    for expert, begin, end in zip(*(tensor.tolist() for tensor in grouping[1:]), strict=True):
        if expert != triton_moe.NOBODY:
            assert 0 < end - begin <= 16
            assert all(experts.flatten()[pair] == expert for pair in order[begin:end])
            covered += range(begin, end)
    assert sorted(covered) == list(range(tokens * top_k))


def make_block(device: torch.device, *, num_experts: int, top_k: int, hidden: int, inner: int) -> MixtureOfExperts:
    block = MixtureOfExperts(
        hidden,
        inner,
        num_experts=num_experts,
        top_k=top_k,
        normalize=True,
        activation="silu",
        dtype=torch.float32,
        device=device,
    )
    assert block.router.weight is not None
    for weight in (block.router.weight, block.gate_up, block.down):
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


@pytest.mark.parametrize("kind", ["random", "skewed", "last"])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (33, 5, 3), (20, 9, 1)])
def test_experts(kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    block = make_block(device, num_experts=num_experts, top_k=top_k, hidden=48, inner=40)
    x = torch.randn(tokens, 48, device=device)
    experts = routing(kind, tokens, num_experts, top_k).to(device)
    shares = torch.rand(tokens, top_k, device=device)
    expected = torch.zeros(tokens, 48, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(experts[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = (block.gate_up[expert].double() @ x[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += share * (block.down[expert].double() @ inner).cpu()
    found = block.grouped(x, shares, experts)
    assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-5


def test_invariant_experts_do_not_feel_the_batch(device: torch.device) -> None:
    block = make_block(device, num_experts=6, top_k=2, hidden=48, inner=40)
    block.make_batch_invariant()
    x = torch.randn(40, 48, device=device)
    experts = routing("random", 40, 6, 2).to(device)
    shares = torch.rand(40, 2, device=device)
    together = block.grouped(x, shares, experts)
    for rows in (slice(0, 1), slice(39, 40), slice(5, 30)):
        assert block.grouped(x[rows], shares[rows], experts[rows]).equal(together[rows])
