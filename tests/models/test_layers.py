"""The layers of the decoder."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from chairlift.layers.formats.none import PlainWeight, can_pack
from chairlift.layers.linear import Build, Linear
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.norm import RMSNorm
from chairlift.layers.routing import Routing

CPU = torch.device("cpu")


def _linear(out_features: int, in_features: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Build(dtype, CPU).linear(in_features, out_features, bias=bias)
    assert linear.weight.plain is not None
    linear.weight.plain.normal_(std=in_features**-0.5)
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (17, 33), (1, 5), (1000, 48)])
def test_packed_linear_is_the_same_map(out_features: int, in_features: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = _linear(out_features, in_features, bias, torch.float32)
    weight = linear.weight.plain
    assert weight is not None
    x = torch.randn(37, in_features)
    wanted = F.linear(x, weight, linear.bias)
    linear.finalize()
    assert (linear.weight.plain is None) == can_pack(weight), "the plain copy must be released"
    with torch.inference_mode():
        torch.testing.assert_close(linear(x), wanted, atol=1e-5, rtol=1e-5)
        # Rows of a view, and no rows at all.
        wide = torch.randn(37, in_features + 3)
        view = wide[::2, :in_features]
        torch.testing.assert_close(linear(view), F.linear(view, weight, linear.bias), atol=1e-5, rtol=1e-5)
        assert linear(x[:0]).shape == (0, out_features)


def test_zero_rows_never_reach_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with part of a prompt samples nothing, and GPU tensor descriptors reject tensors without rows."""
    monkeypatch.delattr(PlainWeight, "product")
    linear = _linear(96, 64, False, torch.bfloat16)
    for linear.weight.batch_invariant in (False, True):
        assert linear(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 96)


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    linear = _linear(600, 576, True, torch.float32)
    linear.finalize()
    x = torch.randn(130, 576)
    together = linear(x)
    for size in (1, 2, 3, 8, 31, 64, 129):
        torch.testing.assert_close(linear(x[:size]), together[:size], atol=1e-5, rtol=1e-5)


def test_packed_bfloat16_rounds_like_the_plain_map() -> None:
    torch.manual_seed(0)
    linear = _linear(96, 64, False, torch.bfloat16)
    weight = linear.weight.plain
    assert weight is not None
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    linear.finalize()
    torch.testing.assert_close(linear(x), F.linear(x, weight), atol=1e-2, rtol=1e-2)


def test_a_shared_weight_keeps_its_plain_tensor() -> None:
    table = torch.randn(40, 12)
    head = Linear(table, shared=True)
    head.finalize()
    x = torch.randn(3, 12)
    torch.testing.assert_close(head(x), x @ table.T)
    assert head.num_bytes in (0, table.nbytes)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(unit_offset: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(24, 1e-5, Build(dtype, CPU), unit_offset=unit_offset)
    stored = torch.randn(24).to(norm.weight.dtype)
    norm.weight.copy_(stored)
    norm.finalize()
    x = (torch.randn(5, 3, 24) * 4).to(dtype)
    exact = x.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (stored.double() + unit_offset)
    result = norm(x)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normalize", [False, True])
def test_experts_against_a_loop_over_tokens(normalize: bool) -> None:
    torch.manual_seed(0)
    moe = MixtureOfExperts(
        12,
        8,
        Routing(num_experts=5, top_k=2, normalize=normalize),
        activation="silu",
        build=Build(torch.float32, CPU),
    )
    router = moe.router.linear.weight.plain
    assert router is not None
    for weight in (router, moe.gate_up.plain, moe.down.plain):
        weight.normal_()
    moe.finalize()
    x = torch.randn(11, 12)
    x[3] = x[0]  # two tokens with the same experts
    wanted = torch.zeros_like(x)
    for row, token in enumerate(x):
        scores = (router @ token).softmax(0)
        best = scores.topk(2)
        weights = best.values / best.values.sum() if normalize else best.values
        for weight, expert in zip(weights, best.indices, strict=True):
            gate, up = (moe.gate_up.plain[expert] @ token).chunk(2)
            wanted[row] += weight * (moe.down.plain[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(moe(x, torch.arange(11)), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(moe(x[:1], torch.arange(1)), wanted[:1], atol=1e-4, rtol=1e-4)
