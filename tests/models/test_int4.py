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
from chairlift.layers.formats import int4
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.formats.int4 import Int4Weight, round_groups
from chairlift.layers.formats.none import PlainWeight
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


def test_weights_are_rounded_in_pieces_that_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, sizes, whole = torch.randn(96, 8192), list[int](), int4._best_grid

    def best_grid(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes.append(groups.numel())
        return whole(groups, dtype)

    monkeypatch.setattr(int4, "_best_grid", best_grid)
    pieces = round_groups(weight, 32, torch.float16)
    assert sizes == [2**18] * 3
    monkeypatch.setattr(int4, "CPU_SLAB", weight.numel())
    for piece, expected in zip(pieces, round_groups(weight, 32, torch.float16), strict=True):
        torch.testing.assert_close(piece, expected)


def test_constant_and_zero_groups() -> None:
    for value in (0.0, 3.25):
        weight = torch.full((16, 64), value)
        numbers, scales, offsets = round_groups(weight, 32, torch.bfloat16)
        assert torch.equal(in_full(numbers, scales, offsets, 32).float(), weight)


def test_products_use_the_rounded_weight() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    linear = Linear(weight.clone(), format=Int4Weight)
    linear.finalize()
    linear.finalize()  # as a decoder does
    expected = x.double() @ in_full(*round_groups(weight, 32, torch.bfloat16), 32).T
    torch.testing.assert_close(linear(x).double(), expected, rtol=0.02, atol=0.2)
    assert linear.num_bytes == 48 * (128 // 2 + 4 * 4)  # chunks of 128 columns, with a scale and an offset for each 32


def test_blocks_have_the_rounded_weight() -> None:
    """In float32 on a CPU; rows of the identity are rounded without loss."""
    torch.manual_seed(0)
    weight = torch.randn(20, 96)
    linear = Linear(weight.clone(), format=Int4Weight)
    linear.finalize()
    linear.finalize()
    assert isinstance(linear.weight, BlockWeight)
    assert linear.weight.kinds == ["Q4_1"]
    expected = in_full(*round_groups(weight, 32, torch.float16), 32)
    torch.testing.assert_close(linear(torch.eye(96)).T.double(), expected, rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_fit_stay_plain() -> None:
    weight = torch.randn(20, 96).bfloat16()
    linear = Linear(weight.clone(), format=Int4Weight)
    linear.finalize()
    torch.testing.assert_close(linear(torch.eye(96).bfloat16()).T, weight)
    assert linear.num_bytes == weight.nbytes


def integers(group: int, offsets: bool, rows: int = 32, **changes: Any) -> GroupedIntegers:
    scales = torch.rand(rows, 256 // group).half()
    shift = torch.randn(rows, 256 // group) if offsets else None
    numbers = torch.randint(0, 16, (rows, 256), dtype=torch.uint8)
    return GroupedIntegers(**{"bits": 4, "numbers": numbers, "scales": scales, "offsets": shift} | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_checkpoint_are_joined(dtype: torch.dtype) -> None:
    """Groups of 128 and 64 have a common size, and symmetric weights have offsets as well."""
    parts = [integers(128, False), integers(64, True), integers(256, True, rows=16)]
    assert Int4Weight.accepts(parts, dtype, CPU)
    weight = Int4Weight.empty(80, 256, dtype, CPU)
    weight.load(parts)
    final = weight.finalized()
    assert isinstance(final, BlockWeight if dtype is torch.float32 else Int4Weight)
    expected = torch.cat([part.dequantized() for part in parts])
    found = final.product(torch.eye(256, dtype=dtype)).rows.T.float()
    atol = 2e-3 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=atol, atol=atol)


def test_what_the_kernels_cannot_multiply_is_not_accepted() -> None:
    eights = integers(32, True, bits=8)
    unsorted = integers(32, True, group_of=torch.randint(0, 8, (256,)))
    for part in (eights, unsorted, integers(16, True), integers(32, True, rows=20)):
        assert not Int4Weight.accepts([part], torch.float32, CPU)
        assert not Int4Weight.accepts([integers(32, True), part], torch.float32, CPU)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.integers])
def test_a_checkpoint_is_computed_as_it_is_stored(name: str, tmp_path: Path) -> None:
    """The probabilities are those of the dequantized weights, up to the rounding of activations to 8 bits."""
    write_quantized(tmp_path / "model", SCHEMES[name])
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "4MiB", "progress": False}
    stored = LLM(str(tmp_path / "model"), quantization="checkpoint", **options)
    plain = LLM(str(tmp_path / "model-plain"), quantization="none", **options)
    prompt, scoring = list(range(5, 211, 7)), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    one, other = (
        torch.tensor(
            [next(iter(each.values())).logprob for each in llm.generate(prompt, scoring)[0].prompt_logprobs[1:]]
        )
        for llm in (stored, plain)
    )
    assert (one - other).abs().mean() < 0.05 * other.std()
    config = EngineConfig(quantization="checkpoint", device="cpu", dtype="float32")
    model = load_model(str(tmp_path / "model"), config, progress=False).model
    assert isinstance(model, Decoder)
    kinds = [type(linear.weight) for layer in model.layers for linear in layer.linears()]
    skipped = len(SCHEMES[name].skipped) - 2  # single maps that the checkpoint does not quantize
    assert kinds.count(BlockWeight) == 8 - skipped
    assert kinds.count(PlainWeight) == skipped
    assert type(model.head.weight) is PlainWeight


def test_a_model_is_rounded_while_it_is_loaded(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    llm = LLM(str(tmp_path), quantization="int4", device="cpu", kv_memory="4MiB", progress=False)
    output = llm.generate("blocks are", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 8
