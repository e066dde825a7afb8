"""The kernels compared with float64 on random batches at the sizes of real models. tests/kernels has small sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.layers.formats.fp8 import FP8, multiply, round_rows
from chairlift.layers.linear import Build
from chairlift.layers.moe import MixtureOfExperts
from chairlift.layers.routing import Routing

pytest.importorskip("triton", reason="the GPU kernels need triton")

from chairlift.kernels.triton.decode import DecodeTiling, _decode_tiling
from chairlift.kernels.triton.int4.product import choose_int4_vector_tiling, int4_product
from chairlift.kernels.triton.norms import add_rms_norm_
from chairlift.kernels.triton.products.activation import gated_mul
from chairlift.kernels.triton.products.invariant import invariant_linear
from chairlift.kernels.triton.products.product import product
from tests.kernels.attention_cases import (
    TOLERANCE,
    AttentionCase,
    check_fused_decode,
    error,
    make_case,
    reference,
    run_decode,
    run_hopper_prefill,
    run_prefill,
)
from tests.kernels.test_triton_int4 import make
from tests.kernels.test_triton_invariant import attend, cut
from tests.kernels.test_triton_layers import normed
from tests.kernels.test_triton_layers import test_rotate_and_store as check_rotation
from tests.kernels.test_triton_routing import RULES
from tests.kernels.test_triton_routing import test_routing as check_routing
from tests.kernels.test_triton_sampling import run as run_sampling

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# heads, KV heads, head size, tokens per block, dtype, window, soft cap
ATTENTION: dict[str, tuple[int, int, int, int, torch.dtype, int | None, float | None]] = {
    "llama-3-8b": (32, 8, 128, 16, BF16, None, None),
    "llama-3-8b float16, large blocks": (32, 8, 128, 128, FP16, None, None),
    "llama-3-8b float32": (32, 8, 128, 16, FP32, None, None),
    "qwen3-0.6b": (16, 8, 128, 16, BF16, None, None),
    "qwen2-0.5b": (14, 2, 64, 16, BF16, None, None),
    "smollm2-135m": (9, 3, 64, 8, FP32, None, None),
    "phi-3-mini": (32, 32, 96, 16, BF16, 2047, None),
    "gemma-2-9b": (16, 8, 256, 16, BF16, 4096, 50.0),
    "mistral-7b": (32, 8, 128, 32, BF16, 300, None),
    "one head of keys": (16, 1, 128, 16, BF16, None, None),
}
BATCHES, ROWS = (1, 7, 64, 300), (1, 33, 3000)
PRODUCTS = [(1536, 576), (1000, 1024), (6144, 4096), (4096, 4096), (4096, 14336), (151_936, 1024)]  # columns, depth


def context_lengths(rng: random.Random, count: int, most: int) -> list[int]:
    """Return some long and many short context lengths with a sum of at most `most` tokens."""
    lengths = [int(2 ** rng.uniform(0, 14.5)) for _ in range(count)]
    share = min(1.0, most / sum(lengths))
    return [max(0, int(length * share)) for length in lengths]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("cache", ["own type", "fp8"])
def test_attention(name: str, cache: str) -> None:
    heads, kv_heads, dim, block_size, dtype, window, softcap = ATTENTION[name]
    if cache == "fp8" and dtype is FP32:
        pytest.skip("the cache of a model in float32 is never rounded")
    rng = random.Random(name)
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    shape |= {"dtype": dtype, "device": DEVICE}
    scale = dim**-0.5
    for number, rows in enumerate(BATCHES):
        decode = make_case(context_lengths(rng, rows, 60_000), [1] * rows, seed=number, **shape)
        starts = context_lengths(rng, 1 + rows % 5, 9_000)
        prefill = make_case(starts, [rng.choice((1, 2, 17, 128, 129, 400)) for _ in starts], seed=number, **shape)
        for case in (decode, prefill):
            if cache == "fp8":
                case.keys, case.values = case.keys.to(FP8), case.values.to(FP8)
        for case, run in ((decode, run_decode), (prefill, run_prefill)):
            found = run(case, scale, window, softcap)
            assert error(found, reference(case, scale, window, softcap)) < TOLERANCE[dtype], (rows, run.__name__)


# heads, KV heads, head size, tokens per block, dtype, sinks, tokens in the cache and new ones of each request
HOPPER: dict[str, tuple[int, int, int, int, torch.dtype, bool, list[int], list[int]]] = {
    "several": (32, 8, 128, 16, BF16, False, [0, 40, 1000, 0, 8191, 127, 128], [75, 9, 300, 2, 129, 1, 256]),
    "a whole prompt": (32, 8, 128, 16, BF16, False, [0], [1000]),
    "behind a context": (32, 8, 128, 16, BF16, False, [5001], [515]),
    "many short": (32, 8, 128, 16, BF16, False, [0] * 40, [3 + 7 * i % 50 for i in range(40)]),
    "seven heads of 64": (14, 2, 64, 16, BF16, False, [0, 300, 17], [700, 77, 5]),
    "sinks": (64, 8, 64, 16, BF16, True, [0, 300], [300, 130]),
    "float16, large blocks": (32, 8, 128, 128, FP16, False, [0, 500], [260, 131]),
    "one head of keys": (16, 1, 128, 32, BF16, False, [7, 500], [260, 131]),
    "no groups": (8, 8, 128, 64, BF16, False, [7, 500], [260, 131]),
}


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
@pytest.mark.parametrize("name", HOPPER)
def test_prefill_on_hopper(name: str) -> None:
    heads, kv_heads, dim, block_size, dtype, with_sinks, starts, counts = HOPPER[name]
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    case = make_case(starts, counts, dtype=dtype, device=DEVICE, **shape)
    rows = torch.randn(len(case.q), heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    case.q = rows[:, :heads]  # as the projection leaves them
    case.sinks = torch.randn(heads, device=DEVICE) if with_sinks else None
    expected = reference(case, dim**-0.5, None, None)
    spoil(case)
    for _ in range(3):  # races differ from run to run
        assert error(run_hopper_prefill(case, dim**-0.5), expected) < TOLERANCE[dtype]


def spoil(case: AttentionCase) -> None:
    """Fill what no token of the case has written to the cache with NaN."""
    size = case.keys.shape[1]
    written = torch.zeros(case.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for slot, start, count in zip(case.slots, case.starts, case.counts, strict=True):
        position = torch.arange(start + count, device=DEVICE)
        written[case.tables[slot].long()[position // size], position % size] = True
    for side in (case.keys, case.values):
        side[~written] = float("nan")


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "smollm2-135m"])
def test_invariant_attention(name: str) -> None:
    heads, kv_heads, dim, block_size, dtype, window, softcap = ATTENTION[name]
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    case = make_case([0, 3000, 700], [500, 130, 1], dtype=dtype, device=DEVICE, **shape)
    options: dict[str, Any] = {"longest": 4096, "window": window, "softcap": softcap}
    whole = attend(case, **options, singles=False)
    assert error(whole, reference(case, dim**-0.5, window, softcap)) < TOLERANCE[dtype]
    for sequence, first, count in ((0, 499, 1), (0, 100, 300), (1, 129, 1), (1, 1, 100), (2, 0, 1)):
        row = case.rows[sequence] + first
        part = cut(case, sequence, first, count)
        for singles in (False, True) if count == 1 else (False,):
            assert attend(part, **options, singles=singles).equal(whole[row : row + count])


@pytest.mark.parametrize(("columns", "depth"), PRODUCTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(depth)
    x = torch.randn(150, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(columns, depth, device=DEVICE) * depth**-0.5).to(dtype)
    total = torch.randn(150, columns, device=DEVICE).to(dtype)
    plain = x.double() @ weight.double().T
    whole = invariant_linear(x, weight)
    assert error(whole, plain) < TOLERANCE[dtype]
    for rows in (1, 2, 8, 17, 32, 64, 150):
        assert invariant_linear(x[:rows], weight).equal(whole[:rows])
        if dtype is FP32:  # the other kernel is for the short types
            continue
        assert error(product(x[:rows], weight)[0], plain[:rows]) < TOLERANCE[dtype]
        added, sums = product(x[:rows], weight, add_to=total[:rows].clone())
        assert error(added, plain[:rows] + total[:rows].double()) < TOLERANCE[dtype]
        assert sums is not None
        assert error(sums.sum(1), added.double().square().sum(1)) < 1e-4


@pytest.mark.parametrize(("columns", "depth"), [(1536, 576), (3072, 1024), (14_336, 4096)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gated_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(depth)
    x = torch.randn(150, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * columns, depth, device=DEVICE) * depth**-0.5).to(dtype)
    squares = torch.rand(150, 5, device=DEVICE) * depth
    scaled = x.double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / depth + 1e-6)
    gate, up = (scaled @ weight.double().T).chunk(2, dim=1)
    expected = gate * gate.sigmoid() * up
    for rows in (1, 2, 8, 17, 32, 64, 150):
        found, _ = product(x[:rows], weight, squares=squares[:rows], eps=1e-6, gated=True)
        assert error(found, expected[:rows]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("columns", "depth"), PRODUCTS[2:5])
def test_products_of_8_bit_floats(columns: int, depth: int) -> None:
    x = torch.randn(150, depth, device=DEVICE, dtype=BF16)
    weight = round_rows(torch.randn(columns, depth, device=DEVICE))
    rounded = round_rows(x)
    factors = [side.numbers.double() * side.scales.double()[:, None] for side in (rounded, weight)]
    expected = factors[0] @ factors[1].T
    for own_kernel in (False, True):
        for rows in (1, 16, 150):
            found = multiply(round_rows(x[:rows]), weight, None, x.dtype, own_kernel=own_kernel)
            assert error(found, expected[:rows]) < TOLERANCE[BF16]


@pytest.mark.parametrize(("columns", "depth"), PRODUCTS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_with_8_bit_weights(columns: int, depth: int, dtype: torch.dtype) -> None:
    """Activations are exact with few rows, and rounded before the product with more."""
    torch.manual_seed(depth)
    x = torch.randn(150, depth, device=DEVICE).to(dtype)
    weight = round_rows(torch.randn(2 * (columns // 32) * 16, depth, device=DEVICE) * depth**-0.5)
    squares = x.float().pow(2).sum(1, keepdim=True)
    rounded = round_rows(x)
    exact, numbers = weight.numbers.double() * weight.scales.double()[:, None], weight.numbers
    normed = x.double() * torch.rsqrt(squares.double() / depth + 1e-6)
    gate, up = (normed @ exact.T).chunk(2, dim=1)
    for rows in (1, 8, 17, 32):
        found, _ = product(x[:rows], numbers, weight_scales=weight.scales)
        assert error(found, x[:rows].double() @ exact.T) < TOLERANCE[dtype]
        found, _ = product(x[:rows], numbers, weight_scales=weight.scales, squares=squares[:rows], eps=1e-6, gated=True)
        assert error(found, (gate * gate.sigmoid() * up)[:rows]) < TOLERANCE[dtype]
    wide = rounded.numbers.double() * rounded.scales.double()[:, None]
    for rows in (33, 64, 150):
        found, _ = product(
            rounded.numbers[:rows],
            numbers,
            weight_scales=weight.scales,
            x_scales=rounded.scales[:rows],
            out_dtype=dtype,
        )
        # Tensor cores add products of 8-bit numbers with about 14 bits, whatever the type of the result.
        assert error(found, wide[:rows] @ exact.T) < TOLERANCE[BF16]


@pytest.mark.parametrize(("columns", "depth"), [*PRODUCTS[2:5], (1536, 768), (1024, 512)])
@pytest.mark.parametrize(("group", "offsets"), [(128, False), (128, True), (64, False), (32, False), (32, True)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_of_a_row_with_4_bit_weights(
    columns: int, depth: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    """With a few large activations, as real models have them."""
    torch.manual_seed(depth)
    matrix, values = make(columns, depth, group, offsets, dtype, DEVICE)
    x = torch.randn(1, depth, device=DEVICE)
    x[0, ::300] *= 1000.0
    x, total = x.to(dtype), torch.randn(1, columns, device=DEVICE).to(dtype)
    squares, norm = x.float().pow(2).sum(1, keepdim=True), torch.rand(columns, device=DEVICE).to(dtype)
    assert choose_int4_vector_tiling(columns, depth, group, offsets, False) is not None
    expected = x.double() @ values.T
    assert error(int4_product(x, matrix)[0], expected) < 0.004
    factor = torch.rsqrt(squares.double() / depth + 1e-6)
    gate, up = (expected * factor).chunk(2, dim=1)
    found = int4_product(x, matrix, squares=squares, eps=1e-6, gated=True)[0]
    assert error(found, gate * gate.sigmoid() * up) < 0.006
    added, sums, scaled = int4_product(x, matrix, add_to=total.clone(), next_norm=norm)
    assert error(added, expected + total.double()) < 0.004
    assert sums is not None
    assert scaled is not None
    assert error(sums.sum(1), added.double().square().sum(1)) < 1e-4
    assert error(scaled, added.double() * norm.double()) < 0.004


@pytest.mark.parametrize("size", [576, 4096, 14_336])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_and_gates(size: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x, delta = (torch.randn(rows, size, device=DEVICE).to(dtype) for _ in range(2))
        weight = torch.randn(size, device=DEVICE).to(dtype)
        total = x.double() + delta.double()
        found = add_rms_norm_(x, delta, weight, 1e-5)
        assert error(x, total) < TOLERANCE[dtype]
        assert error(found, normed(total, weight.double(), 1e-5)) < TOLERANCE[dtype]
        gate_up = torch.randn(rows, 2 * size, device=DEVICE).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        assert error(gated_mul(gate_up, "silu"), gate * gate.sigmoid() * up) < TOLERANCE[dtype]
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
        assert error(gated_mul(gate_up, "gelu_tanh"), gate * up) < TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 4, 256), (32, 32, 96)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotation(heads: int, kv_heads: int, dim: int, with_norm: bool) -> None:
    for new_heads in (0, 1, 2):
        check_rotation(heads, kv_heads, dim, dim // 2, with_norm, with_norm, new_heads, DEVICE)
    for splits, window in ((1, None), (3, 20)):
        tiling = DecodeTiling(16, 16, 4, 2, early=with_norm)
        check_fused_decode(heads, kv_heads, dim, dim // 2, splits, window, tiling, DEVICE)


@pytest.mark.parametrize("programs", [128, 512, 2048])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 8, 128), (32, 32, 96)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_fused_decode_over_an_8_bit_cache(
    heads: int, kv_heads: int, dim: int, programs: int, dtype: torch.dtype
) -> None:
    tiling = _decode_tiling(programs // kv_heads, kv_heads, heads // kv_heads, dim, dtype, FP8)
    assert tiling.turned
    options: dict[str, Any] = {"dtype": dtype, "cache": FP8, "tolerance": TOLERANCE[dtype]}
    for splits, window in ((1, None), (3, 20)):
        short = tiling._replace(min_split=16)
        check_fused_decode(heads, kv_heads, dim, dim // 2, splits, window, short, DEVICE, **options)


@pytest.mark.parametrize(("num_experts", "top_k", "hidden", "inner"), [(8, 2, 1024, 3584), (128, 8, 2048, 768)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts(num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    routing = Routing(num_experts=num_experts, top_k=top_k, normalize=True)
    block = MixtureOfExperts(hidden, inner, routing, Build(dtype, DEVICE), activation="silu")
    for weight in (block.gate_up.plain, block.down.plain):
        weight.normal_(std=weight.shape[-1] ** -0.5)
    for tokens in (1, 5, 64, 700):
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        experts = torch.rand(tokens, num_experts, device=DEVICE).topk(top_k, dim=-1).indices
        shares = torch.rand(tokens, top_k, device=DEVICE).to(dtype)
        expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
        for expert in range(num_experts):
            token, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ block.gate_up.plain[expert].double().T).chunk(2, dim=-1)
            result = (gate * gate.sigmoid() * up) @ block.down.plain[expert].double().T
            expected.index_add_(0, token, result * shares[token, place, None].double())
        found = block.grouped(x, shares, experts, torch.zeros(tokens, dtype=torch.int32, device=DEVICE))
        assert error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", RULES)
def test_routing(name: str) -> None:
    check_routing(name, DEVICE)


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sampling(vocab: int, dtype: torch.dtype) -> None:
    """A sampled token is the one at its random number in the cumulative weights, up to rounding."""
    from chairlift.core.sampling.params import SamplingParams

    rng = random.Random(vocab)
    logits = (torch.randn(200, vocab, device=DEVICE) * 3).to(dtype)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 50}]
    kinds += [{"temperature": 1.2, "top_p": 0.8}, {"temperature": 0.9, "min_p": 0.02, "top_k": 9, "top_p": 0.95}]
    params = [SamplingParams(**rng.choice(kinds)) for _ in range(len(logits))]
    uniforms = [rng.random() for _ in params]
    tokens: list[int] = []
    for at in range(0, len(params), 10):  # `run_sampling` has a dozen slots
        part = slice(at, at + 10)
        tokens += run_sampling(logits[part], params[part], uniforms[part], list(range(10)))[0].tolist()
    for row, param, uniform, token in zip(logits, params, uniforms, tokens, strict=True):
        if param.temperature == 0:
            assert row[token] == row.max()
            continue
        assert_drawn(row.double() / param.temperature, param, uniform, token)


def assert_drawn(scores: Tensor, params: Any, uniform: float, token: int) -> None:
    weights = scores.softmax(-1)
    ordered = weights.sort(descending=True).values
    if params.top_k:
        ordered = ordered[ordered >= ordered[params.top_k - 1]]  # ties with the last one are kept
    count = 1 + int((ordered.cumsum(0) < params.top_p * ordered.sum()).sum())
    last = min(count, len(ordered)) - 1
    least = max(float(ordered[last]), params.min_p * float(ordered[0]))
    # Rounding of a sum may keep one token more or less.
    next_one = float(ordered[min(last + 1, len(ordered) - 1)])
    assert weights[token] >= min(least, max(next_one, params.min_p * float(ordered[0]))) * (1 - 1e-5)
    kept = torch.where(weights >= least * (1 - 1e-9), weights, 0.0)
    sums, slack = kept.cumsum(0) / kept.sum(), 1e-4 + 2 * least / float(kept.sum())
    assert float(sums[token]) >= uniform - slack
    assert float(sums[token] - weights[token] / kept.sum()) <= uniform + slack
