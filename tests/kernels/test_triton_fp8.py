"""FP8 weights, activations and KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from chairlift.attention.backends.bursted import BurstedAttention
from chairlift.attention.backends.padded import PaddedAttention
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.config import EngineConfig
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.settings import kv_dtype
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter
from chairlift.kernels.triton import fp8 as triton_fp8
from chairlift.kernels.triton.decode import Fresh
from chairlift.kernels.triton.layers import rotate_and_store_
from chairlift.kernels.triton.products.invariant import invariant_linear
from chairlift.kernels.triton.products.product import product
from chairlift.kernels.triton.products.tiling import ProductTiling
from chairlift.kernels.triton.vector import MOST_STEPS, VectorTiling, choose_vector_tiling, vector_product
from chairlift.layers.formats.fp8 import FP8, LARGEST, FP8Weight, ScaledRows, fp8_obstacles, multiply, round_rows
from chairlift.models import build_model, format_obstacles
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.models.loader import DecoderLoader
from chairlift.models.read_config import decoder_config
from chairlift.runner.memory import HostBlocks, allocate_storage
from tests.kernels.attention_cases import error, make_case, reference, run_decode, run_prefill
from tests.kernels.test_triton_invariant import attend
from tests.kernels.tiny_config import CONFIG


def same(found: Tensor, expected: Tensor, *, but: float = 0.0) -> bool:
    """Whether e4m3 numbers are equal, but for a share that was near the middle of two."""
    return bool((found.float().cpu() == expected.float().cpu()).float().mean() >= 1.0 - but)


def test_rows_are_quantized_the_same_everywhere(device: torch.device) -> None:
    x = torch.randn(5, 70, device=device) * torch.tensor([[1e-3], [1.0], [50.0], [1e4], [0.0]], device=device)
    numbers, scales = triton_fp8.round_rows(x, LARGEST)
    expected = round_rows(x.cpu())
    assert torch.allclose(scales.cpu(), expected.scales)
    assert same(numbers, expected.numbers)
    assert error(expected.numbers.float() * expected.scales[:, None], x.double().cpu()) < 0.04  # three bits of mantissa
    assert numbers.float().abs().amax(dim=1)[:4].eq(LARGEST).all()
    assert not numbers[4].float().any()


@pytest.mark.parametrize(("rows", "channels", "depth"), [(1, 33, 70), (40, 70, 1100)])
def test_own_product(rows: int, channels: int, depth: int, device: torch.device) -> None:
    """Exact: the reference uses the same rounded factors."""
    x, bias = torch.randn(rows, depth, device=device), torch.randn(channels, device=device)
    weight = round_rows(torch.randn(channels, depth, device=device))
    rounded = round_rows(x)
    factors = [side.numbers.double() * side.scales.double()[:, None] for side in (rounded, weight)]
    found = multiply(round_rows(x), weight, bias, x.dtype, own_kernel=True)
    # Hopper's tensor cores accumulate fp8 products with fewer bits than float32.
    assert error(found, factors[0] @ factors[1].T + bias.double()) < (3e-4 if found.is_cuda else 1e-5)
    assert multiply(round_rows(x[-1:]), weight, bias, x.dtype, own_kernel=True).equal(found[-1:])


def test_torchs_product(device: torch.device) -> None:
    if fp8_obstacles(device) and device.type == "cuda":
        pytest.skip("no 8-bit floats on this GPU")
    x = torch.randn(7, 64, device=device).bfloat16()
    weight = round_rows(torch.randn(48, 64, device=device))
    rounded = round_rows(x)
    factors = [side.numbers.double() * side.scales.double()[:, None] for side in (rounded, weight)]
    assert error(multiply(round_rows(x), weight, None, x.dtype, own_kernel=False), factors[0] @ factors[1].T) < 1e-2


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize("rounded", [False, True], ids=["wide", "rounded"])
@pytest.mark.parametrize(("rows", "splits", "described"), [(1, 1, False), (5, 2, True), (40, 3, True), (70, 1, True)])
def test_products_with_8_bit_weights(
    kind: str, rounded: bool, rows: int, splits: int, described: bool, device: torch.device
) -> None:
    """Activations that are not rounded before the product keep their precision."""
    torch.manual_seed(rows)
    gated, added, columns, depth = kind == "gated", kind == "added", 100, 272
    x = torch.randn(rows, depth, device=device).half()
    x[0] *= 1e3  # rows have scales of their own
    weight = round_rows(torch.randn(columns * (1 + gated), depth, device=device) / depth**0.5)
    squares = None if added or rounded else x.float().pow(2).sum(1, keepdim=True)
    total = torch.randn(rows, columns, device=device).half() if added else None
    scaled = round_rows(x)
    wide = scaled.numbers.double() * scaled.scales.double()[:, None] if rounded else x.double()
    expected = wide @ (weight.numbers.double() * weight.scales.double()[:, None]).T
    if squares is not None:
        expected *= torch.rsqrt(squares.double() / depth + 1e-6)
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    if total is not None:
        expected += total.double()
    tiling = ProductTiling(16 if rows <= 16 else 64, 64, 64, splits, 3, described=described)
    for chosen in (tiling, None):
        found, sums = product(
            scaled.numbers if rounded else x,
            weight.numbers,
            weight_scales=weight.scales,
            x_scales=scaled.scales if rounded else None,
            squares=squares,
            eps=1e-6,
            gated=gated,
            add_to=None if total is None else total.clone(),
            out_dtype=torch.float32 if rounded and not added else None,
            tiling=chosen,
        )
        assert error(found, expected) < 1e-3  # of float16, whose rounding is 2e-4
        if added:
            assert sums is not None
            assert torch.allclose(sums.sum(1).double(), found.double().pow(2).sum(1), rtol=1e-3)


def eight_bit_case(rows: int, kind: str, device: torch.device) -> tuple[Tensor, ScaledRows, Tensor, Tensor, Tensor]:
    """Activations, a weight, what the product is added to, sums of squares, and the result in float64."""
    torch.manual_seed(rows)
    columns, depth = 72, 528
    x = torch.randn(rows, depth, device=device).half()
    weight = round_rows(torch.randn(columns * (1 + (kind == "gated")), depth, device=device) / depth**0.5)
    weight.numbers.view(torch.uint8)[0, :5] = torch.tensor([0, 1, 129, 8, 135], dtype=torch.uint8)  # also denormal
    squares = x.float().pow(2).view(rows, 3, -1).sum(2)
    total = torch.randn(rows, columns, device=device).half()
    expected = x.double() @ (weight.numbers.double() * weight.scales.double()[:, None]).T
    expected *= torch.rsqrt(squares.double().sum(1, keepdim=True) / depth + 1e-6)
    if kind == "gated":
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    return x, weight, total, squares, expected + total.double() if kind == "added" else expected


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize(
    "tiling",
    [
        None,
        VectorTiling(8, 256, 3, 1, 4),
        VectorTiling(8, 128, 5, 1, 1, ahead=2),
        VectorTiling(16, 256, 1, 3, 2),
        VectorTiling(8, 128, 3, 2, 1, ahead=2),
        VectorTiling(4, 1024, 1, 1, 4),
    ],
)
def test_products_of_a_single_row(kind: str, tiling: VectorTiling | None, device: torch.device) -> None:
    x, weight, total, squares, expected = eight_bit_case(1, kind, device)
    norm: dict[str, Any] = {"squares": squares, "eps": 1e-6}
    added = total.clone() if kind == "added" else None
    found, sums = vector_product(x, *weight, tiling=tiling, gated=kind == "gated", add_to=added, **norm)
    assert error(found, expected) < 1e-3
    if added is not None:
        assert sums is not None
        assert torch.allclose(sums.sum(1).double(), found.double().pow(2).sum(1), rtol=1e-3)


def test_a_single_row_with_a_bias(device: torch.device) -> None:
    x, weight, bias, squares, expected = eight_bit_case(1, "plain", device)
    found, _ = vector_product(x, *weight, squares=squares, eps=1e-6, bias=bias[0])
    assert error(found, expected + bias.double()) < 1e-3


def test_a_single_row_converts_every_number_exactly(device: torch.device) -> None:
    """Each of the four numbers of a word."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)[:, None].repeat(1, 32)
    numbers[[127, 255]] = 0  # NaN
    weight = numbers.view(FP8)
    for lane in range(4):
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.zeros(1, 32, dtype=dtype, device=device)
            x[0, 16 + lane] = 1.0
            tiling = VectorTiling(256, 32, 1, 1, 4)
            found, _ = vector_product(x, weight, torch.ones(256, device=device), tiling=tiling)
            assert found[0].float().equal(weight[:, 0].float())


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("depth", [16, 528, 1024, 3072, 14336, 28672, 40000])
def test_tiles_of_a_single_row_cover_the_depth(depth: int, added: bool, device: torch.device) -> None:
    tiling = choose_vector_tiling(depth, gated=False, added=added)
    assert tiling.steps <= MOST_STEPS
    assert tiling.splits * tiling.steps * tiling.depth >= depth
    torch.manual_seed(depth)
    x = torch.randn(1, depth, device=device).half()
    weight = round_rows(torch.randn(6, depth, device=device) / depth**0.5)
    total = torch.randn(1, 6, device=device).half()
    expected = x.double() @ (weight.numbers.double() * weight.scales.double()[:, None]).T
    found, _ = vector_product(x, *weight, add_to=total.clone() if added else None)
    assert error(found, expected + total.double() if added else expected) < 1e-3


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize(
    ("rows", "tiling"), [(3, None), (20, ProductTiling(64, 64, 64, 2, 2, described=True)), (9, None)]
)
def test_products_of_pairs_of_rows(kind: str, rows: int, tiling: ProductTiling | None, device: torch.device) -> None:
    """Activations that the kernel before has split are nearly as exact as those that are not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("this GPU does not multiply e4m3 with e5m2")
    x, weight, total, squares, expected = eight_bit_case(rows, kind, device)
    added = total.clone() if kind == "added" else None
    pairs = triton_fp8.empty_pairs(rows, 72, device)
    found, sums = product(
        triton_fp8.pairs_of(x), weight.numbers, weight_scales=weight.scales, squares=squares, eps=1e-6, tiling=tiling,
        gated=kind == "gated", add_to=added, pairs_out=pairs, out_dtype=x.dtype,
    )  # fmt: skip
    assert error(found, expected) < 1e-2
    assert error(pairs.float().view(rows, 2, -1).sum(1), found.double()) < 4e-3
    if added is not None:
        assert sums is not None
        assert torch.allclose(sums.sum(1).double(), found.double().pow(2).sum(1), rtol=1e-3)


def test_rows_are_split_into_pairs(device: torch.device) -> None:
    x = torch.randn(3, 100, device=device) * 10.0 ** torch.arange(-3, 5, device=device).repeat(13)[:100]
    pairs = triton_fp8.pairs_of(x).float().view(3, 2, 100)
    kept = x.abs() < 57344
    assert float(((pairs.sum(1) - x).abs() / (x.abs() + 1e-3))[kept].max()) < 1 / 32
    assert error(pairs.sum(1)[kept], x[kept].double()) < 4e-3
    x[1, 7], x[2, 8] = float("nan"), 1e9
    found = triton_fp8.pairs_of(x).float().view(3, 2, 100).sum(1)
    assert found.isnan().nonzero().tolist() == [[1, 7]]
    assert found[2, 8] == 57344, "numbers that are too large become the largest"


def test_norms_are_rounded_in_one_pass(device: torch.device) -> None:
    x, delta = torch.randn(5, 70, device=device).half(), torch.randn(5, 70, device=device).half()
    weight = torch.rand(70, device=device).half() + 0.5
    for added in (None, delta):
        stream = x.clone()
        numbers, scales = triton_fp8.norm_rounded(stream, added, weight, 1e-6, LARGEST)
        total = x if added is None else x + added
        assert stream.equal(total)
        wide = total.double()
        expected = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6) * weight.double()
        assert torch.allclose(scales.double(), expected.abs().amax(1) / LARGEST, rtol=1e-5)
        assert same(numbers, round_rows(expected.float()).numbers, but=0.02)


def test_gates_are_rounded_in_one_pass(device: torch.device) -> None:
    gate_up = torch.randn(5, 140, device=device).half()
    numbers, scales = triton_fp8.silu_mul_rounded(gate_up, LARGEST)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(scales.double(), expected.abs().amax(1) / LARGEST, rtol=1e-5)
    assert same(numbers, round_rows(expected.float()).numbers, but=0.02)


def test_attention_over_an_fp8_cache(device: torch.device) -> None:
    decode, prefill = make_case([3, 90], [1, 1], device=device), make_case([0, 50], [20, 9], device=device)
    for case in (decode, prefill):
        case.keys, case.values = case.keys.to(FP8), case.values.to(FP8)
    assert error(run_decode(decode, 0.2, None, None, 2), reference(decode, 0.2, None, None)) < 1e-5
    expected = reference(prefill, 32**-0.5, None, None)
    assert error(run_prefill(prefill, 32**-0.5, None, None), expected) < 1e-5
    invariant = attend(prefill, longest=128, window=None, softcap=None, singles=False)
    assert error(invariant, expected) < 1e-5


def test_values_beyond_the_cache_type_are_clamped(device: torch.device) -> None:
    qkv = torch.randn(3, 4 * 16, device=device)
    qkv[1] *= 1e4
    new = qkv.clone().view(3, 4, 16)
    keys, values = store_in_8_bits(qkv, heads=2, positions=[0, 1, 5])
    other = KVStorage([torch.zeros_like(keys)], [torch.zeros_like(values)])
    other.write(0, torch.tensor([4, 5, 1], device=device), new[:, 2:3], new[:, 3:4])
    for mine, theirs in ((keys, other.keys[0]), (values, other.values[0])):
        assert same(mine, theirs)
        assert mine.float().abs().max() == LARGEST


@pytest.fixture
def chip_arithmetic(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the GPU's maxima and clamps, which drop NaN; the interpreter keeps it."""
    if device.type == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        bounded = np.clip if propagate == tl.PropagateNan.ALL else lambda *all: np.fmin(np.fmax(*all[:2]), all[2])
        return self.ternary_op(x, low, high, bounded)

    monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
    monkeypatch.setattr(InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))
    monkeypatch.setattr(InterpreterBuilder, "create_clampf", clamp)


@pytest.mark.usefixtures("chip_arithmetic")
def test_nan_rows_stay_nan(device: torch.device) -> None:
    x = torch.randn(3, 70, device=device)
    x[1, 69] = float("nan")
    numbers, scales = triton_fp8.round_rows(x, LARGEST)
    assert scales.isnan().tolist() == [False, True, False]
    assert round_rows(x.cpu()).scales.isnan().tolist() == [False, True, False]
    weight = round_rows(torch.randn(33, 70, device=device))
    found = invariant_linear(numbers, weight.numbers, scales=(scales, weight.scales), out_dtype=torch.float32)
    assert found.isnan().all(dim=1).tolist() == [False, True, False]
    assert found[::2].isfinite().all()


@pytest.mark.usefixtures("chip_arithmetic")
def test_nan_keys_stay_nan(device: torch.device) -> None:
    qkv = torch.randn(2, 4 * 16, device=device)
    # For the key: the interpreter truncates numbers beyond e4m3, which leaves a NaN here.
    qkv[1, 40] = torch.tensor(0x7FF00000, dtype=torch.int32).view(torch.float32)
    keys, values = store_in_8_bits(qkv, heads=2, positions=[0, 1])
    assert keys[1, :2].float().isnan().any(dim=-1).flatten().tolist() == [False, True]
    assert values.float().isfinite().all()


def store_in_8_bits(qkv: Tensor, *, heads: int, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values [2, 4, 1, 16] of a sequence with the blocks 1 and 0 after these tokens."""
    keys, values = (torch.zeros(2, 4, 1, 16, device=qkv.device).to(FP8) for _ in range(2))
    ints = {"dtype": torch.int32, "device": qkv.device}
    rotate_and_store_(
        qkv,
        keys,
        values,
        Fresh(None, None, 0.0, None, None),
        num_heads=heads,
        slots=torch.zeros(len(qkv), **ints),
        positions=torch.tensor(positions, **ints),
        tables=torch.tensor([[1, 0]], **ints),
    )
    return keys, values


def test_blocks_are_copied_and_swapped() -> None:
    layers = decoder_config(CONFIG).attention_layers
    storage = allocate_storage(layers, 3, 4, FP8, torch.device("cpu"))
    shape = storage.keys[0].shape
    storage.keys[0].copy_(torch.randn(shape).to(FP8))
    first = storage.keys[0][0].float().clone()
    storage.copy_blocks([0], [2])
    host = HostBlocks(storage, 2)
    host.save([2], [1])
    host.restore([1], [1])
    assert storage.read(0, torch.tensor([1]), 4, torch.float32)[0].equal(first)
    assert bytes_per_token(layers, FP8) * 2 == bytes_per_token(layers, torch.bfloat16)
    assert storage.keys[0].nbytes + storage.values[0].nbytes == 4 * 4 * bytes_per_token(layers[:1], FP8)


def test_every_backend_reads_an_fp8_cache() -> None:
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    layout = RaggedLayout([0, 2, 4], [3, 0], [5, 2], torch.tensor([[2, 0], [1, 0]]), torch.tensor([11, 0, 4, 5]))
    batch = StepBatch(torch.zeros(4), torch.tensor([3, 4, 0, 1]), layout)
    q, k, v = torch.randn(4, 2, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    cached = [torch.randn(4, 4, 1, 16).to(FP8) for _ in range(2)]
    found = [
        backend().begin(batch, KVStorage([cached[0].clone()], [cached[1].clone()])).attend(layer, q, k, v)
        for backend in (BurstedAttention, PaddedAttention)
    ]
    torch.testing.assert_close(*found)


def test_parts_are_filled_on_a_device_with_an_index() -> None:
    """What is filled is on cuda:0 where cuda was asked for."""
    weight = FP8Weight.empty(4, 16, torch.float16, torch.device("cpu", 0))
    parts = torch.randn(2, 2, 16).half()
    weight.fill_rows(0, parts[0])
    weight.fill_rows(2, parts[1])
    assert weight.plain is not None
    assert weight.plain.equal(parts.flatten(0, 1))


def test_a_quantized_decoder_counts_its_bytes_and_stays_close(device: torch.device) -> None:
    exact = build_model(CONFIG, dummy_tensors(CONFIG, device), dtype=torch.float16, device=device)
    model = Decoder(decoder_config(CONFIG), dtype=torch.float16, device=device, format=FP8Weight)
    DecoderLoader(model).load(dummy_tensors(CONFIG, device))
    assert isinstance(exact, Decoder)
    for mine, theirs in zip(model.layers[0].linears(), exact.layers[0].linears(), strict=True):
        assert mine.num_bytes == mine.out_features * (
            mine.in_features + 4
        )  # one byte per weight and one scale per channel
        x = torch.randn(5, mine.in_features, device=device).half()
        assert error(mine(x), theirs(x).double()) < 0.06


@pytest.mark.parametrize("quantize", [False, True])
def test_the_head_is_rounded_only_if_asked_for(quantize: bool, device: torch.device) -> None:
    config = decoder_config(CONFIG)
    model = Decoder(config, dtype=torch.float16, device=device, format=FP8Weight, quantize_head=quantize)
    DecoderLoader(model).load(dummy_tensors(CONFIG, device))
    assert isinstance(model.head.weight, FP8Weight) == quantize
    hidden = torch.randn(3, config.hidden_size, device=device).half()
    expected = hidden.double() @ model.embedding.table.double().T
    assert error(model.logits(hidden), expected) < (0.08 if quantize else 5e-3)
    rounded = model.num_weight_bytes() - model.embedding.table.nbytes
    assert (model.head.num_bytes > 0) == quantize, "a tied head that is not rounded takes no memory of its own"
    assert rounded >= model.head.num_bytes


def test_refused_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(InvalidParameter, match=r"quantization.*fp8 is not possible.*not for the cpu"):
        build_model(CONFIG, [], dtype=torch.bfloat16, device=cpu, quantization="fp8")
    model = build_model(CONFIG, dummy_tensors(CONFIG, cpu), dtype=torch.float32, device=cpu)
    with pytest.raises(InvalidParameter, match=r"kv_dtype.*fp8 is not possible.*not for the cpu.*float32"):
        kv_dtype(EngineConfig(device="cpu", kv_dtype="fp8"), model)
    with pytest.raises(InvalidParameter, match=r"kv_dtype.*fp8 is not possible"):
        load_model("nowhere", EngineConfig(device="cpu", kv_dtype="fp8"))  # before the model is looked up
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert fp8_obstacles(cuda) == ["8-bit floats need a GPU of compute capability 8.9 or later, this one has 8.0"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fp8_obstacles(cuda) == []
    assert "bfloat16 or float16" in format_obstacles(CONFIG, "fp8", torch.float32, cuda)[0]
    mixture = CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    mixture |= {"moe_intermediate_size": 8}
    assert format_obstacles(mixture, "fp8", torch.bfloat16, cuda) == []
    assert format_obstacles(mixture, "int4", torch.bfloat16, cuda) == ["this model has experts"]
