"""Shared experts as further experts of the grouped kernels, against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from chairlift.kernels.triton.experts import routing
from chairlift.kernels.triton.experts.few_rows import RowNorm
from chairlift.kernels.triton.experts.tiling import MOST_FOLDED_TOKENS
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build
from chairlift.layers.moe import MixtureOfExperts, SharedExpert
from chairlift.layers.routing import ExpertRouter, Routing
from chairlift.models import build_model
from chairlift.models.decoder import Decoder
from chairlift.models.decoder_layer import LayerStep
from chairlift.models.dummy import dummy_tensors
from chairlift.models.programs.fuse_gpu import operations_of
from chairlift.models.programs.streams import Stream
from tests.kernels.test_few_experts import expected_of, experts_of
from tests.kernels.test_triton_moe import covered
from tests.kernels.test_triton_mxfp4 import stored
from tests.kernels.test_triton_routing import RULES
from tests.kernels.tiny_config import CONFIG

HIDDEN, INNER, EXPERTS, TOP_K = 128, 64, 9, 3
KINDS = ["plain", "three", "no gate", "weighted inputs", "fp8"]


def make_block(
    kind: str, device: torch.device, *, is_gated: bool = False, shared_size: int | None = None
) -> MixtureOfExperts:
    has_gates, format = kind != "no gate", {"fp8": FP8Weight, "mxfp4": CheckpointWeight}.get(kind, PlainWeight)
    size = INNER * (3 if kind == "three" else 2) if shared_size is None else shared_size
    options: dict[str, Any] = {"has_gates": has_gates, "activation": "silu" if has_gates else "relu2"}
    options["build"] = Build(torch.float32, device, format)
    shared = SharedExpert(HIDDEN, size, is_gated=is_gated, **options)
    rule = Routing(
        num_experts=EXPERTS, top_k=TOP_K, normalize=True, scale=2.5, weights_inputs=kind == "weighted inputs"
    )
    block = MixtureOfExperts(HIDDEN, INNER, rule, shared=shared, **options)
    names = ("g", "u") if has_gates else ("u",)
    targets = [
        *block.expert_targets(names, "d"),
        *shared.targets("s", names, "d", "gate"),
        *block.router.targets("r", "c"),
    ]
    for number, (name, target) in enumerate(targets):
        if kind == "mxfp4" and name[0].isdigit():
            target.copy_(stored(*target.shape, seed=number))
        else:
            target.copy_(torch.randn(target.shape, device=device) * 0.1)
    if kind == "fp8":  # on a CPU, other products would be packed in another layout
        for linear in shared.linears():
            linear.finalize()
    return block


def values(weight: WeightFormat) -> Tensor:
    found = weight.row_major
    assert found is not None
    numbers, scales = found
    return numbers.double().cpu() if scales is None else numbers.double().cpu() * scales.double().cpu()[:, None]


def expected_whole(block: MixtureOfExperts, x: Tensor) -> Tensor:
    """The block in float64, with its shared expert as one dense block."""
    assert block.shared is not None
    both = x.double().cpu() @ values(block.shared.mlp.first.weight).T
    gate, up = both.chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up if block._has_gates else torch.relu(both).square()
    return expected_of(block, x, None) + inner @ values(block.shared.mlp.down.weight).T


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


def routed(block: MixtureOfExperts, x: Tensor, num_shared: int) -> tuple[Tensor, Tensor]:
    return block.router.choose_on_gpu(block.router.linear(x), x.dtype, num_shared)


@pytest.mark.parametrize("name", RULES)
def test_every_token_has_them_with_weight_one(name: str, device: torch.device) -> None:
    rule = RULES[name]
    torch.manual_seed(len(name))
    router = ExpertRouter(HIDDEN, rule, Build(torch.float32, device))
    assert router.linear.weight.plain is not None
    router.linear.weight.plain.normal_(std=0.1)
    if router.correction_bias is not None:
        router.correction_bias.normal_(std=0.3)
    x = torch.randn(5, HIDDEN, device=device)
    weights, experts = router.choose_on_gpu(router.linear(x), torch.float32)
    more_weights, more = router.choose_on_gpu(router.linear(x), torch.float32, 2)
    assert more[:, :-2].equal(experts)
    torch.testing.assert_close(more_weights[:, :-2], weights)
    assert more[:, -2:].tolist() == [[rule.num_experts, rule.num_experts + 1]] * 5
    assert more_weights[:, -2:].tolist() == [[1.0, 1.0]] * 5
    positions = torch.tensor([0, 1, -1, 3, 4], dtype=torch.int32, device=device)
    few, groups, _ = router.group_few(x, positions, num_shared=2)
    torch.testing.assert_close(few, more_weights, rtol=1e-4, atol=1e-6)
    wanted = {token: set(more[token].tolist()) for token in (0, 1, 3, 4)}
    assert experts_of(groups, rule.top_k + 2) == wanted


@pytest.mark.parametrize("shared_rows", [16, 32, 64])
def test_grouping(shared_rows: int, device: torch.device) -> None:
    """Shared experts have larger tiles; every pair of a row that is not padding is in one."""
    torch.manual_seed(shared_rows)
    routed = torch.rand(53, 5).topk(3).indices
    experts = torch.cat((routed, torch.tensor([5, 6]).expand(53, 2)), dim=1).int()
    positions = torch.arange(53, dtype=torch.int32)
    positions[5::7] = -1
    groups = routing.group_by_expert(
        experts.to(device), 5, 16, positions.to(device), num_shared=2, shared_rows=shared_rows
    )
    live = int((positions >= 0).sum())
    tiles = list(zip(*(each.tolist() for each in groups[1:]), strict=True))
    assert covered(groups, experts, shared_rows) == list(range(5 * live))
    for expert in (5, 6):
        spans = [(begin, end) for of, begin, end in tiles if of == expert]
        assert len(spans) == -(-live // shared_rows)
        assert all(before[1] == after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 20, 70])
def test_blocks(kind: str, tokens: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    block = make_block(kind, device)
    count = block.num_folded(tokens)
    assert count == (3 if kind == "three" else 2)
    x = torch.randn(tokens, HIDDEN, device=device)
    expected = expected_whole(block, x)
    positions = torch.zeros(tokens, dtype=torch.int32, device=device)
    rounded = kind == "fp8" and tokens == 70  # activations are, too
    limit = 0.05 if rounded else 1e-5
    assert error(block.grouped(x, *routed(block, x, count), positions), expected) < limit
    if tokens == 7:
        assert error(block.few_rows(x, x, positions), expected) < limit
    if tokens > 1:  # padding does not change the other rows
        positions[3] = -1
        rows = [row for row in range(tokens) if row != 3]
        found = [block.grouped(x, *routed(block, x, count), positions)]
        found += [block.few_rows(x, x, positions)] if tokens == 7 else []
        assert all(error(each[rows], expected[rows]) < limit for each in found)


@pytest.mark.parametrize("kind", ["plain", "fp8"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_norm_and_addition(kind: str, tokens: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    block = make_block(kind, device)
    x, weight = torch.randn(tokens, HIDDEN, device=device), torch.rand(HIDDEN, device=device)
    assert block.adds_few_rows(x)
    normed = x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * weight
    expected = x.double().cpu() + expected_whole(block, normed)
    norm = RowNorm(x.square().sum(dim=1, keepdim=True), weight, 1e-6)
    squares = block.add_few_rows(x, norm, torch.zeros(tokens, dtype=torch.int32, device=device))
    assert error(x, expected) < 1e-5
    torch.testing.assert_close(squares.sum(dim=1), x.square().sum(dim=1))


def test_others_stay_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with a gate of their own, of another size or in another form, and steps of many tokens."""
    from chairlift.kernels.triton.launch import generic_kernels

    block = make_block("plain", device)
    assert block.num_folded(MOST_FOLDED_TOKENS) == 2
    assert block.num_folded(MOST_FOLDED_TOKENS + 1) == 0
    with generic_kernels():
        assert block.num_folded(1) == 0
    block.make_batch_invariant()
    assert block.num_folded(1) == 0
    assert make_block("plain", device, is_gated=True).num_folded(1) == 0
    assert make_block("plain", device, shared_size=INNER + 16).num_folded(1) == 0
    assert make_block("plain", device, shared_size=INNER).num_folded(1) == 1
    monkeypatch.setattr("chairlift.layers.expert_weights.on_gpu", lambda device: True)
    mixed = make_block("mxfp4", device)
    assert mixed.gate_up.form == "mxfp4"
    assert mixed.num_folded(1) == 0
    assert not mixed.adds_few_rows(torch.zeros(1, HIDDEN, device=device))


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 0,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "n_shared_experts": 1},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 24},
    "glm4_moe": {
        "first_k_dense_replace": 0,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
        "use_bias": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [3, 20])
def test_layers_of_families(family: str, tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything behind the attention, with few rows in the kernels that have the norm and the addition, too."""
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    config = CONFIG | FAMILIES[family] | {"model_type": family, "num_hidden_layers": 1, "tie_word_embeddings": False}
    monkeypatch.setattr("chairlift.layers.formats.none.can_pack", lambda weight: False)  # as on a GPU
    torch.manual_seed(0)
    weights = ((name, torch.randn(tensor.shape) * 0.2) for name, tensor in dummy_tensors(config, device))
    model = build_model(config, weights, dtype=torch.float16, device=device)
    assert isinstance(model, Decoder)
    (layer,) = model.layers
    (mixer,) = layer.mixers
    x = torch.randn(tokens, model.hidden_size).half()
    mixed = (torch.randn(tokens, mixer.output.in_features).half(),)
    positions = torch.arange(tokens, dtype=torch.int32)
    step = LayerStep(cast(Any, None), positions)
    monkeypatch.setattr(layer, "mix", lambda *rows: mixed)
    expected = layer(x.clone(), step)
    for name in ("layers.moe", "layers.routing", "layers.norm", "layers.mlp", "layers.formats.none"):
        monkeypatch.setattr(f"chairlift.{name}.on_gpu", lambda device: True)
    assert isinstance(layer.mlp, MixtureOfExperts)
    assert layer.mlp.num_folded(tokens)
    monkeypatch.setattr(SharedExpert, "add_to_", None)  # it is not called
    stream = Stream(x.clone())
    adds_late: list[Tensor] = []
    monkeypatch.setattr(stream, "add_late", lambda output, after: adds_late.append(output))
    for operation in operations_of(layer)[1:]:
        operation(stream, step)
    assert (not adds_late) == (tokens == 3), "few rows are added in the kernels"
    found = stream.x + adds_late[0] if adds_late else stream.x
    assert error(found, expected.double()) < 5e-3
