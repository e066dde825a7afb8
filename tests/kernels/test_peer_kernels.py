"""The scripts that time other libraries' kernels compute the same as float64, with stand-ins for those libraries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels need triton")

from tests.gpu.peers import attention, products
from tests.gpu.peers.timing import error

pytestmark = pytest.mark.slow

SHAPES = {"qkv": (256, 128), "output": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
ROWS, HIDDEN = 36, 128


def _bf16_gemm_nt(x: Tensor, weight: Tensor, out: Tensor, *, compiled_dims: str) -> None:
    out.copy_(x.float() @ weight.float().T)


def _fp8_gemm_nt(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    recipe: tuple[int, int, int],
    compiled_dims: str,
) -> None:
    scales = x[1]
    assert scales.stride() == (1, len(scales))  # DeepGEMM would copy another layout
    rows = x[0].float() * scales.repeat_interleave(recipe[2], 1)
    blocks = weight[1].repeat_interleave(recipe[1], 0).repeat_interleave(recipe[2], 1)
    out.copy_(rows @ (weight[0].float() * blocks).T)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, variants in products.VARIANTS.items() for name in variants]
)
def test_every_variant_computes_the_layer(
    kind: str, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = SimpleNamespace(bf16_gemm_nt=_bf16_gemm_nt, fp8_gemm_nt=_fp8_gemm_nt)
    monkeypatch.setattr(products, "deep_gemm", lambda: stand_in)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no products in bfloat16
    weights = {each: torch.randn(shape, device=device).to(dtype) * 0.1 for each, shape in SHAPES.items()}
    layers = products.Layers([weights, weights], products.VARIANTS[kind][name])
    inputs = products.Inputs.random(ROWS, HIDDEN, device, dtype)
    assert max(layers.errors(inputs, weights)) < products.LARGEST_ERROR[kind]
    first = layers.run(inputs)[1].value().clone()
    assert layers.run(inputs)[1].value().equal(first)  # a replayed step begins anew


@pytest.mark.parametrize("queries", [64, 256])
@pytest.mark.parametrize("kernel", ["small tiles", "large tiles"])
def test_attention_reads_the_pages(queries: int, kernel: str, device: torch.device) -> None:
    torch.manual_seed(0)
    prompt = attention.Prompt.random(256, queries, 4, 2, 32, torch.float16, device)
    out = torch.full_like(prompt.q, float("nan"))
    attention.ours(attention.OURS[kernel], prompt, attention.Pages.of(prompt, 16), out)()
    rows = [0, 1, queries // 2, queries - 1]
    assert error(out[rows], attention.reference(prompt, rows)) < 2e-3
