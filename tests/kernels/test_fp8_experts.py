"""Experts in 8-bit floats: what is rounded, what stays as a checkpoint stores it, and the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.layers.expert_weights import ExpertWeights, kept_forms
from chairlift.layers.formats.checkpoint import CheckpointWeight
from chairlift.layers.formats.fp8 import FP8, FP8Weight, round_rows
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Build
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.routing import Routing
from chairlift.loading.stored_weight import ScaledFloats
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.models.loader import DecoderLoader
from chairlift.models.read_config import decoder_config
from chairlift.models.weight_sizes import weight_bytes
from tests.kernels.test_triton_mxfp4 import stored
from tests.kernels.tiny_config import CONFIG

EXPERTS, HIDDEN, INNER = 3, 64, 48
MIXTURE = CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KEEPS: dict[str, Any] = {"dtype": torch.float32, "keeps": frozenset({"fp8", "mxfp4"})}


def make_block(device: torch.device, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    routing = Routing(num_experts=EXPERTS, top_k=2)
    block = MixtureOfExperts(HIDDEN, INNER, routing, Build(dtype, device, FP8Weight), activation="silu")
    torch.manual_seed(0)
    for _, target in block.expert_targets(("gate", "up"), "down"):
        target.copy_(torch.randn(target.shape, device=device) * 0.1)
    return block


def routed(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    experts = torch.rand(tokens, EXPERTS).topk(2).indices.to(device)
    shares, positions = torch.rand(tokens, 2, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
    return torch.randn(tokens, HIDDEN, device=device), shares, experts, positions


def in_8_bits(x: Tensor) -> Tensor:
    rows = round_rows(x.float())
    return rows.numbers.double() * rows.scales.double()[:, None]


@pytest.mark.parametrize(("tokens", "rounded"), [(3, False), (40, True)])
def test_products(tokens: int, rounded: bool, device: torch.device) -> None:
    """Few rows keep their precision; of many, the reference rounds the same activations."""
    block = make_block(device)
    x, shares, experts, positions = routed(tokens, device)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64, device=device)
    for expert in range(EXPERTS):
        (token, place) = (experts == expert).nonzero(as_tuple=True)
        rows = in_8_bits(x[token]) if rounded else x[token].double()
        gate, up = (rows @ block.gate_up.dequantized(expert).double().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        inner = in_8_bits(inner) if rounded else inner
        outer = inner @ block.down.dequantized(expert).double().T
        expected.index_add_(0, token, outer * shares[token, place].double()[:, None])
    found = block.grouped(x, shares, experts, positions).double()
    # A number near the middle of two may be rounded the other way.
    assert float((found - expected).norm() / expected.norm()) < (3e-3 if rounded else 1e-5)


def test_rounding_does_not_depend_on_the_batch(device: torch.device) -> None:
    block = make_block(device)
    block.make_batch_invariant()
    x, *more = routed(40, device)
    together = block.grouped(x, *more)
    for rows in (slice(0, 1), slice(39, 40), slice(5, 30)):
        assert block.grouped(x[rows], *(each[rows] for each in more)).equal(together[rows])


@pytest.mark.parametrize("block", [(48, 64), (1, 64), (16, 32)], ids=["tensor", "channel", "block"])
def test_rows_of_a_checkpoint(block: tuple[int, int], device: torch.device) -> None:
    """Scales per tensor and channel are kept exactly; blocks are rounded again."""
    torch.manual_seed(1)
    numbers = torch.randn(48, 64).to(FP8)
    scales = torch.rand(-(-48 // block[0]), -(-64 // block[1])) + 0.1
    source = ScaledFloats(numbers, scales, block)
    weights = ExpertWeights(2, 96, 64, device=device, **KEEPS)
    weights.fill(1, 48, source)
    assert weights.form == "fp8"
    found, expected = weights.dequantized(1)[48:].cpu(), source.dequantized()
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < 0.04 if block == (16, 32) else error == 0
    assert not weights.dequantized(0).any()
    assert weights.num_bytes == 2 * 96 * (64 + 4)


def test_rows_in_several_forms_become_plain(device: torch.device) -> None:
    eight = ScaledFloats(torch.randn(32, 64).to(FP8), torch.full((1, 1), 0.5), (32, 64))
    weights = ExpertWeights(3, 32, 64, device=device, **KEEPS)
    weights.fill(0, 0, eight)
    four = stored(32, 64, seed=0)
    weights.fill(1, 0, four)
    weights.fill(2, 0, eight)
    assert weights.form == "plain"
    for expert, source in enumerate((eight, four, eight)):
        assert weights.dequantized(expert).cpu().equal(source.dequantized())
    integers = ScaledFloats(torch.ones(32, 64, dtype=torch.int8), torch.ones(1, 1), (32, 64))
    others = ExpertWeights(1, 32, 64, device=device, **KEEPS)
    others.fill(0, 0, integers)
    assert others.form == "plain"


def test_what_stays_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kept_forms(CheckpointWeight, torch.bfloat16, cuda) == {"fp8", "mxfp4"}
    assert kept_forms(CheckpointWeight, torch.float32, cuda) == {"mxfp4"}
    assert kept_forms(CheckpointWeight, torch.bfloat16, cpu) == set()
    assert kept_forms(PlainWeight, torch.bfloat16, cuda) == set()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert kept_forms(CheckpointWeight, torch.bfloat16, cuda) == {"mxfp4"}


def test_a_decoder_with_8_bit_experts(device: torch.device) -> None:
    model = Decoder(decoder_config(MIXTURE), dtype=torch.float16, device=device, format=FP8Weight)
    DecoderLoader(model).load(dummy_tensors(MIXTURE, device))
    mixture = model.layers[0].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert mixture.gate_up.form == mixture.down.form == "fp8"
    assert model.used_formats.endswith("experts: fp8")
    assert model.quantization == "fp8"
    experts = mixture.gate_up.num_bytes + mixture.down.num_bytes
    assert experts == 4 * (96 * (32 + 4) + 32 * (48 + 4))
    estimate = weight_bytes(MIXTURE, FP8Weight, torch.float16, "cuda")
    assert abs(estimate - model.num_weight_bytes()) < 2 * 4 * 32 + 64  # the router is counted as if it were rounded


@pytest.mark.parametrize("block", [(1, 0), (16, 16)], ids=["channel", "block"])
def test_a_decoder_of_an_8_bit_checkpoint(
    block: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a checkpoint stay in 8 bits, expert by expert; what it holds plain stays plain."""
    monkeypatch.setattr("chairlift.layers.expert_weights.on_gpu", lambda device: True)
    monkeypatch.setattr("chairlift.layers.expert_weights.FP8Weight.obstacles", lambda dtype, device: [])
    values: dict[str, Tensor] = {}

    def stream() -> Any:
        for name, tensor in dummy_tensors(MIXTURE, torch.device("cpu")):
            if ".experts." not in name:
                yield name, tensor
                continue
            down, across = block[0], block[1] or tensor.shape[1]
            scales = torch.rand(tensor.shape[0] // down, tensor.shape[1] // across) + 0.5
            weight = ScaledFloats((tensor.float() * 50).to(FP8), scales, (down, across))
            values[name.removeprefix("model.")] = weight.dequantized()
            yield name, weight

    model = Decoder(decoder_config(MIXTURE), dtype=torch.float32, device=device, format=CheckpointWeight)
    DecoderLoader(model).load(stream())
    mixture = model.layers[0].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert mixture.gate_up.form == mixture.down.form == "fp8"
    limit = 0.0 if block == (1, 0) else 0.05
    for expert in range(4):
        parts = {
            "gate_proj": mixture.gate_up.dequantized(expert)[:48],
            "up_proj": mixture.gate_up.dequantized(expert)[48:],
        }
        parts["down_proj"] = mixture.down.dequantized(expert)
        for part, found in parts.items():
            expected = values[f"layers.0.mlp.experts.{expert}.{part}.weight"]
            assert float((found.cpu() - expected).norm() / expected.norm()) <= limit
