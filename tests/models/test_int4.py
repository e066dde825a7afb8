"""Weights in 4 bits: rounding, checkpoints as they are stored, whole models on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.startup import load_model
from chairlift.layers.formats.int4 import Int4Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.group_rounding import round_groups
from chairlift.layers.linear import Linear
from chairlift.loading.stored_weight import GroupedIntegers
from chairlift.models.decoder import Decoder
from tests.loading.quantized_writing import SCHEMES, write_quantized
from tests.tiny import write_tiny_checkpoint

CPU = torch.device("cpu")


def in_full(numbers: Tensor, scales: Tensor, offsets: Tensor, group: int) -> Tensor:
    of_column = torch.arange(numbers.shape[1]) // group
    return numbers.double() * scales.double()[:, of_column] + offsets.double()[:, of_column]


def test_numbers_of_sixteen_levels_are_kept() -> None:
    """Rounding what is on a grid already finds the grid."""
    torch.manual_seed(0)
    levels = torch.randint(0, 16, (8, 4, 32)).float()
    levels[..., 0], levels[..., 1] = 0.0, 15.0
    scales, offsets = (torch.rand(8, 4, 1) + 0.5).bfloat16().float(), torch.randn(8, 4, 1).bfloat16().float()
    weight = (levels * scales + offsets).flatten(1)
    numbers, found, shifts = round_groups(weight, 32, torch.bfloat16)
    assert torch.equal(numbers.float(), levels.flatten(1))
    torch.testing.assert_close(in_full(numbers, found, shifts, 32).float(), weight, rtol=0.01, atol=0.02)


def test_scales_are_chosen_by_their_error() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    weight[::7, 5] = 9.0  # outliers, which it pays to clip in part
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    ours = in_full(*round_groups(weight, 32, torch.bfloat16), 32)
    assert (ours - weight).square().sum() < 0.9 * (plain - groups).square().sum()


def test_constant_and_zero_groups() -> None:
    for value in (0.0, 3.25):
        weight = torch.full((16, 64), value)
        numbers, scales, offsets = round_groups(weight, 32, torch.bfloat16)
        assert torch.equal(in_full(numbers, scales, offsets, 32).float(), weight)


def test_products_use_the_rounded_weight() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96), torch.randn(5, 96)
    linear = Linear(weight.clone(), format=Int4Weight)
    linear.finalize()
    linear.finalize()  # as a decoder does
    expected = x.double() @ in_full(*round_groups(weight, 32, torch.bfloat16), 32).T
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert linear.num_bytes == 48 * (128 // 2 + 4 * 4)  # chunks of 128 columns, with a scale and an offset for each 32


def test_sizes_that_do_not_fit_stay_plain() -> None:
    weight = torch.randn(20, 96)
    linear = Linear(weight.clone(), format=Int4Weight)
    linear.finalize()
    torch.testing.assert_close(linear(torch.eye(96)).T, weight)
    assert linear.num_bytes == weight.nbytes


def integers(group: int, offsets: bool, rows: int = 32, **changes: Any) -> GroupedIntegers:
    scales = torch.rand(rows, 256 // group).half()
    shift = torch.randn(rows, 256 // group) if offsets else None
    numbers = torch.randint(0, 16, (rows, 256), dtype=torch.uint8)
    return GroupedIntegers(**{"bits": 4, "numbers": numbers, "scales": scales, "offsets": shift} | changes)


def test_parts_of_a_checkpoint_are_joined() -> None:
    """Groups of 128 and 64 have a common size, and symmetric weights have offsets as well."""
    parts = [integers(128, False), integers(64, True), integers(256, True, rows=16)]
    assert Int4Weight.accepts(parts, torch.float32, CPU)
    weight = Int4Weight.empty(80, 256, torch.float32, CPU)
    weight.load(parts)
    assert weight.matrix is not None
    assert weight.matrix.group == 64
    expected = torch.cat([part.dequantized() for part in parts])
    torch.testing.assert_close(weight.multiply(torch.eye(256), None).T, expected, rtol=2e-3, atol=2e-3)


def test_what_the_kernels_cannot_multiply_is_not_accepted() -> None:
    eights = integers(32, True, bits=8)
    unsorted = integers(32, True, group_of=torch.randint(0, 8, (256,)))
    for part in (eights, unsorted, integers(16, True), integers(32, True, rows=20)):
        assert not Int4Weight.accepts([part], torch.float32, CPU)
        assert not Int4Weight.accepts([integers(32, True), part], torch.float32, CPU)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.integers])
def test_a_checkpoint_is_computed_as_it_is_stored(name: str, tmp_path: Path) -> None:
    """The logits are those of the dequantized weights, up to the rounding of offsets to 16 bits."""
    write_quantized(tmp_path / "model", SCHEMES[name])
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "4MiB", "progress": False}
    stored = LLM(str(tmp_path / "model"), quantization="checkpoint", **options)
    plain = LLM(str(tmp_path / "model-plain"), quantization="none", **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
    one, other = (llm.generate([5, 17, 40, 211], greedy)[0].outputs[0] for llm in (stored, plain))
    assert one.token_ids == other.token_ids
    config = EngineConfig(quantization="checkpoint", device="cpu", dtype="float32")
    model = load_model(str(tmp_path / "model"), config, progress=False).model
    assert isinstance(model, Decoder)
    kinds = [type(linear.weight) for layer in model.layers for linear in layer.linears()]
    skipped = len(SCHEMES[name].skipped) - 2  # single maps that the checkpoint does not quantize
    assert kinds.count(Int4Weight) == 8 - skipped
    assert kinds.count(PlainWeight) == skipped
    assert type(model.head.weight) is PlainWeight


def test_a_model_is_rounded_while_it_is_loaded(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    llm = LLM(str(tmp_path), quantization="int4", device="cpu", kv_memory="4MiB", progress=False)
    output = llm.generate("blocks are", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 8
