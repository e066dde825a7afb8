"""The grouped products of a mixture of experts against float64, on random routings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.gpu import GPUS, META, described_gpu
from chairlift.kernels.triton.experts import routing
from chairlift.kernels.triton.experts.tiling import tiling_for
from chairlift.kernels.triton.launch import generic_kernels
from chairlift.kernels.triton.products import activation
from chairlift.layers.linear import Build
from chairlift.layers.mlp import ClampedGate
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.routing import Routing
from chairlift.models import build_model
from chairlift.models.dummy import dummy_tensors
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import StepSizes
from chairlift.runner.memory import allocate_storage
from tests.kernels.tiny_config import CONFIG


def chosen_experts(kind: str, tokens: int, num_experts: int, top_k: int) -> Tensor:
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
    """Every pair is in exactly one tile of its expert."""
    experts = chosen_experts(kind, tokens, num_experts, top_k)
    groups = routing.group_by_expert(experts.to(device), num_experts, 16)
    assert groups.order.tolist() == experts.flatten().argsort(stable=True).tolist()
    assert covered(groups, experts) == list(range(tokens * top_k))


@pytest.mark.parametrize(("pairs_at_once", "shortest", "most"), [(16, 32, 8), (16, 16, 2), (64, 64, 32)])
@pytest.mark.parametrize("kind", ["random", "skewed", "last"])
def test_grouping_in_segments(
    kind: str, pairs_at_once: int, shortest: int, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments change nothing, with padding rows and shared experts."""
    experts = torch.cat((chosen_experts(kind, 71, 5, 3), torch.full((71, 1), 5)), dim=1).to(device)
    positions = torch.arange(71, dtype=torch.int32, device=device)
    positions[5::7] = -1
    given: dict[str, Any] = {"num_shared": 1, "shared_rows": 32}
    expected = routing.group_by_expert(experts, 5, 16, positions, **given)
    monkeypatch.setattr(routing, "FEW_PAIRS", 0)
    monkeypatch.setattr(routing, "PAIRS_AT_ONCE", pairs_at_once)
    monkeypatch.setattr(routing, "SHORTEST_SEGMENT", shortest)
    monkeypatch.setattr(routing, "MOST_SEGMENTS", most)
    assert 71 * 4 > routing.segment_of(71 * 4) > 0
    found = routing.group_by_expert(experts, 5, 16, positions, **given)
    live = 4 * int((positions >= 0).sum())
    assert found.order[:live].tolist() == expected.order[:live].tolist()
    assert found.tile_expert.tolist() == expected.tile_expert.tolist()
    has_tile = expected.tile_expert != routing.NO_EXPERT.value
    for mine, theirs in zip(found[2:], expected[2:], strict=True):
        assert mine[has_tile].tolist() == theirs[has_tile].tolist()


def test_segments_are_few_and_whole() -> None:
    assert routing.segment_of(routing.FEW_PAIRS) == 0
    with generic_kernels():
        assert routing.segment_of(10**6) == 0
    for pairs in (routing.FEW_PAIRS + 1, 98_304, 131_072, 10**6):
        segment = routing.segment_of(pairs)
        assert segment % routing.PAIRS_AT_ONCE == 0
        assert -(-pairs // segment) <= routing.MOST_SEGMENTS


def test_many_rows_have_wide_tiles_where_they_fit() -> None:
    columns = {}
    for name in ("a100", "l40s", "h200"):
        with described_gpu(GPUS[name]):
            columns[name] = tiling_for(64 * 200, 64, torch.bfloat16, "plain", META, invariant=False).inner.columns
    assert columns == {"a100": 128, "l40s": 128, "h200": 256}


def covered(groups: routing.Grouping, experts: Tensor, most: int = 16) -> list[int]:
    """Indices in `order` that tiles cover, each checked to be of the tile's expert."""
    order, places = groups.order.tolist(), []
    for expert, begin, end in zip(*(tensor.tolist() for tensor in groups[1:]), strict=True):
        if expert != routing.NO_EXPERT.value:
            assert 0 < end - begin <= most
            assert all(experts.flatten()[pair] == expert for pair in order[begin:end])
            places += range(begin, end)
    return sorted(places)


@pytest.mark.parametrize("kind", ["random", "skewed", "last"])
def test_padding_rows_are_left_out(kind: str, device: torch.device) -> None:
    experts = chosen_experts(kind, 37, 5, 3)
    positions = torch.arange(37, dtype=torch.int32)
    positions[5::2] = -1
    groups = routing.group_by_expert(experts.to(device), 5, 16, positions.to(device))
    (live,) = (positions >= 0).repeat_interleave(3).nonzero(as_tuple=True)
    expected = live[experts.flatten()[live].argsort(stable=True)]
    assert groups.order[: len(live)].tolist() == expected.tolist()
    assert covered(groups, experts) == list(range(len(live)))


def test_the_step_marks_padding_rows_for_experts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the GPU runner with two padding rows, through the GPU experts."""
    shape = CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    shape |= {"moe_intermediate_size": 16, "norm_topk_prob": True, "num_hidden_layers": 2}
    model = build_model(shape, dummy_tensors(shape, device), dtype=torch.float32, device=device)
    seen: list[Tensor] = []

    def spied(experts: Tensor, num_experts: int, rows: int, positions: Tensor, **shared: int) -> routing.Grouping:
        seen.append(positions.cpu())
        return group(experts, num_experts, rows, positions, **shared)

    group = routing.group_by_expert
    monkeypatch.setattr(routing, "group_by_expert", spied)
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
    monkeypatch.setattr(MixtureOfExperts, "__call__", lambda self, x, where: self.grouped(x, *self.router(x), where))
    storage = allocate_storage(model.attention_layers, 4, 8, model.dtype, device)
    runner = GPURunner(model, PagedGPUAttention(), storage, StepSizes(requests=4, tokens=8, context=32, graphs=False))
    request = Request("one", [3, 4], SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    chunk = Chunk(request, start=0, count=2, table=[0], samples=True)
    full = runner.run(StepPlan(step=0, chunks=(chunk,), idle_rows=2))
    assert [positions.tolist() for positions in seen] == [[0, 1, -1, -1], [1]], "the last layer is for who is sampled"
    assert runner.run(StepPlan(step=1, chunks=(chunk,))).tokens == full.tokens


def make_block(device: torch.device, *, num_experts: int, top_k: int, hidden: int, inner: int) -> MixtureOfExperts:
    block = MixtureOfExperts(
        hidden,
        inner,
        Routing(num_experts=num_experts, top_k=top_k, normalize=True),
        activation="silu",
        build=Build(torch.float32, device),
    )
    router = block.router.linear.weight.plain
    assert router is not None
    for weight in (router, block.gate_up.plain, block.down.plain):
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


@pytest.mark.parametrize("kind", ["random", "skewed", "last"])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 2), (33, 5, 3), (20, 9, 1)])
def test_experts(kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    block = make_block(device, num_experts=num_experts, top_k=top_k, hidden=48, inner=40)
    x = torch.randn(tokens, 48, device=device)
    experts = chosen_experts(kind, tokens, num_experts, top_k).to(device)
    shares = torch.rand(tokens, top_k, device=device)
    expected = torch.zeros(tokens, 48, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(experts[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = (block.gate_up.plain[expert].double() @ x[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[token] += share * (block.down.plain[expert].double() @ inner).cpu()
    found = block.grouped(x, shares, experts, torch.zeros(tokens, dtype=torch.int32, device=device))
    assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("weights_inputs", [False, True])
def test_experts_with_biases_a_clamped_gate_or_weighted_inputs(weights_inputs: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_of = ClampedGate(1.702, 0.7)
    block = MixtureOfExperts(
        48,
        40,
        Routing(num_experts=5, top_k=3, weights_inputs=weights_inputs),
        bias=not weights_inputs,
        activation=gate_of,
        build=Build(torch.float32, device),
    )
    weights = [
        block.router.linear.weight.plain,
        block.gate_up.plain,
        block.down.plain,
        block.gate_up_bias,
        block.down_bias,
    ]
    for weight in weights:
        if weight is not None:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    x, shares = torch.randn(33, 48, device=device), torch.rand(33, 3, device=device)
    experts = chosen_experts("random", 33, 5, 3).to(device)
    expected = torch.zeros(33, 48, dtype=torch.float64)
    for token in range(33):
        for expert, share in zip(experts[token].tolist(), shares[token].double(), strict=True):
            row = x[token].double() * (share if weights_inputs else 1)
            both = block.gate_up.plain[expert].double() @ row
            both += 0 if block.gate_up_bias is None else block.gate_up_bias[expert].double()
            gate, up = both.chunk(2)
            gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
            out = block.down.plain[expert].double() @ ((up + 1) * gate * (1.702 * gate).sigmoid())
            out += 0 if block.down_bias is None else block.down_bias[expert].double()
            expected[token] += (out * (1 if weights_inputs else share)).cpu()
    positions = torch.zeros(33, dtype=torch.int32, device=device)
    for found in (block.grouped(x, shares, experts, positions), block._one_after_the_other(x, shares, experts.long())):
        assert float((found.double().cpu() - expected).norm() / expected.norm()) < 1e-5


def test_the_clamped_gate(device: torch.device) -> None:
    gate_up = 3 * torch.randn(7, 2 * 1100, device=device)
    gate_up[0, :2] = torch.tensor([float("inf"), -200.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = activation.clamped_mul(gate_up, 1.702, 2.0)
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    expected = (up + 1) * gate * (1.702 * gate).sigmoid()
    for each in (found, ClampedGate(1.702, 2.0)(*gate_up.chunk(2, dim=-1))):
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-6)


def test_invariant_experts_do_not_depend_on_the_batch(device: torch.device) -> None:
    block = make_block(device, num_experts=6, top_k=2, hidden=48, inner=40)
    block.make_batch_invariant()
    x = torch.randn(40, 48, device=device)
    experts = chosen_experts("random", 40, 6, 2).to(device)
    shares = torch.rand(40, 2, device=device)
    positions = torch.zeros(40, dtype=torch.int32, device=device)
    together = block.grouped(x, shares, experts, positions)
    for rows in (slice(0, 1), slice(39, 40), slice(5, 30)):
        assert block.grouped(x[rows], shares[rows], experts[rows], positions[rows]).equal(together[rows])
