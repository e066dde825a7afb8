"""`python compile_for.py CAPABILITY [brief]`: compile every Triton kernel for a GPU that is not there, and list them.

Launches go to a driver that does nothing. Kernels are called through their wrappers, in the shapes of a Llama with GQA,
so that signatures, tiles and launch options are those of real steps. `brief` compiles products for one batch size, and
each choice of attention kernels in one combination instead of all.
"""

# ruff: noqa: E402 - driver and launch options are replaced before the kernels are imported

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes of one program
capability = int(sys.argv[1])
hopper = capability >= 90
brief = "brief" in sys.argv[2:]
BATCH_SIZES = (100,) if brief else (1, 24, 100)
compiled: list[str] = []


class Driver:
    """A GPU that runs nothing."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
        load_binary=lambda name, *binary: compiled.append(name) or (1, 2, 0, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


triton.runtime.driver.set_active(Driver())

from chairlift.kernels.triton import launch

launch.overlapping = lambda device: {"OVERLAP": True, "launch_pdl": True} if hopper else {"OVERLAP": False}
launch.shared_memory = lambda device: SHARED_MEMORY[capability]

from chairlift.attention.recurrent import RecurrentBatch
from chairlift.kernels.adapter_table import WIDTH, entry
from chairlift.kernels.triton import fp8, invariant_attention, layers, norms, sampling, vector
from chairlift.kernels.triton.attention import Chunks, Scoring
from chairlift.kernels.triton.decode import Fresh, _decode_tiling
from chairlift.kernels.triton.drafts import draft_inputs, store_states
from chairlift.kernels.triton.experts import few_rows, microscaled, products, routing
from chairlift.kernels.triton.experts.products import ExpertMatrix, Gate, SharedMatrix
from chairlift.kernels.triton.experts.tiling import few_rows_tiling, tiling_for
from chairlift.kernels.triton.int4 import product as int4
from chairlift.kernels.triton.int4.matrix import store
from chairlift.kernels.triton.invariant_decode import invariant_decode
from chairlift.kernels.triton.latent import absorbed, hopper_decode
from chairlift.kernels.triton.latent.expanded import attend_within_chunks, values_of
from chairlift.kernels.triton.latent.prepare import NewLatents, prepare_and_absorb_, prepare_latents_
from chairlift.kernels.triton.products import activation, invariant, product
from chairlift.kernels.triton.products import tiling as product_tiling
from chairlift.kernels.triton.products.adapters import FEW_ROWS, add_terms
from chairlift.kernels.triton.recurrent.convolution import convolve
from chairlift.kernels.triton.recurrent.gates import RawGates, gated_norm
from chairlift.kernels.triton.recurrent.recurrence import run_recurrence
from chairlift.kernels.triton.sampling import likeliest
from chairlift.layers.expert_weights import PANEL, RUN, num_chunks
from chairlift.layers.recurrent.base import GateOrder, RecurrenceRule
from tests.kernels.attention_cases import as_ints, chunks_of, make_case, run_decode, run_hopper_prefill, run_prefill

product.reads_ahead = lambda device: hopper
product_tiling.tiles_agree = lambda dtype, device: True
int4.has_asm = microscaled.has_asm = vector.has_asm = lambda device: True
int4.reads_ahead = lambda device: hopper

CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
CACHES = (BF16, FP8) if capability >= 89 else (BF16,)
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 8, 2, 128, 1024, 2048, 5000


def compile_attention() -> None:
    shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": BF16, "device": CPU}
    decode, prefill = make_case([3, 90], [1, 1], **shape), make_case([0, 40], [75, 9], **shape)
    narrow = make_case([3, 90], [1, 1], **shape | {"dim": 16})
    norms = torch.ones(DIM, dtype=BF16)
    cos = torch.ones(2, DIM // 2, dtype=BF16)
    fused = make_case([3, 90], [1, 1], **shape | {"heads": HEADS + 2 * KV_HEADS})
    out = torch.empty(2, HEADS, DIM, dtype=BF16)
    for cache in CACHES:
        for case in (decode, narrow, prefill, fused):
            case.keys, case.values = case.keys.to(cache), case.values.to(cache)
        if cache is CACHES[0] or not brief:
            run_decode(decode, 0.1, None, None)
            run_decode(fused, 0.1, None, None, out=out, fresh=Fresh(norms, norms, 1e-6, cos, cos))
            run_prefill(prefill, 0.1, None, None)
        if not brief:
            run_decode(narrow, 0.1, None, None)
        if cache is CACHES[-1] or not brief:
            run_prefill(prefill, 0.1, 64, 30.0, deep=True)
    if hopper:
        long = replace(prefill, keys=prefill.keys.to(BF16), values=prefill.values.to(BF16))
        for sinks in (None,) if brief else (None, torch.zeros(HEADS)):
            run_hopper_prefill(replace(long, sinks=sinks), 0.1)
    for programs in () if capability < 89 else (600,) if brief else (300, 500, 600):  # the tilings of an 8-bit cache
        tiling = _decode_tiling(programs // KV_HEADS, KV_HEADS, HEADS // KV_HEADS, DIM, BF16, FP8)
        assert tiling.turned
        joined = Fresh(norms, norms, 1e-6, cos, cos)
        run_decode(fused, 0.1, None, None, 2, out=out, fresh=joined, tiling=tiling)
        run_decode(narrow, 0.1, 64, 30.0, 2, tiling=tiling)
    for case in (decode, prefill, fused):  # the caches are in the last type
        case.sinks, case.chunk = torch.zeros(HEADS), 64
    if not brief:
        run_decode(decode, 0.1, None, None)
    run_decode(fused, 0.1, None, None, out=out, fresh=Fresh(None, None, 0.0, cos, cos))
    run_prefill(prefill, 0.1, None, None)
    compile_invariant_attention(prefill)
    for dtype in (BF16,) if brief else (BF16, torch.float32):
        wide: dict[str, Any] = {"heads": 8, "kv_heads": 1, "dim": 512, "dtype": dtype, "device": CPU}
        run_decode(make_case([3, 90], [1, 1], **wide), 0.1, None, None)
        for new_heads in (1,) if brief else (0, 1, 2):
            case = make_case([3, 90], [1, 1], **wide | {"heads": 8 + new_heads})
            norms = torch.ones(512, dtype=dtype)
            cos, out = torch.ones(2, 256, dtype=dtype), torch.empty(2, 8, 512, dtype=dtype)
            fresh = Fresh(norms, norms, 1e-6, cos, cos, new_heads > 0)
            run_decode(case, 0.1, None, None, out=out, fresh=fresh)
        run_prefill(make_case([0, 40], [75, 9], **wide), 0.1, None, None)


def compile_invariant_attention(case: Any) -> None:
    queries = invariant_attention.queries_per_tile(HEADS, KV_HEADS, DIM, BF16)
    chunks, scoring = chunks_of(case, queries), Scoring(0.1, chunk=case.chunk, sinks=case.sinks)
    out = torch.empty_like(case.q)
    keys, values = case.keys.to(BF16), case.values.to(BF16)
    invariant_attention.invariant_attention(case.q, keys, values, out, chunks, scoring)
    scratch = invariant_attention.SpanScratch(HEADS, KV_HEADS, DIM, 4096, CPU)
    norms, cos = torch.ones(DIM, dtype=BF16), torch.ones(2, DIM // 2, dtype=BF16)
    whole = torch.zeros(2, HEADS + 2 * KV_HEADS, DIM, dtype=BF16)
    joined = Fresh(norms, norms, 1e-6, cos, cos)
    for programs, fresh in [(1, None), (2, joined)] if brief else [(1, None), (2, None), (1, joined), (2, joined)]:
        q = whole if fresh else case.q
        invariant_decode(
            q, keys, values, out, tables=case.tables, row_slot=chunks.slot, row_start=chunks.start,
            row_count=chunks.count, scratch=scratch, scoring=scoring, programs=programs, fresh=fresh,
        )  # fmt: skip


def compile_products() -> None:
    weight = torch.randn(2 * INNER, HIDDEN).to(BF16)
    for rows in BATCH_SIZES:
        x = launch.empty_rows(rows, HIDDEN, dtype=BF16, device=CPU)
        squares = torch.ones(rows, 4)
        product.product(x, weight, squares=squares, eps=1e-6, gated=True)
        if not brief:
            product.product(x, weight, gated=True, activation="gelu_tanh")
        times = torch.zeros(rows, 3, 256).to(BF16)
        product.product(x, weight[:256], activation="gelu_tanh", times=times[:, 1])
        product.product(x, weight, add_to=launch.empty_rows(rows, 2 * INNER, dtype=BF16, device=CPU))
        invariant.invariant_linear(x, weight)
    product_tiling._agreement_kernel[(1,)](x, weight, torch.zeros(6, 16, 64), KEPT=16, DEPTH=HIDDEN, COLUMNS=64)
    for rows in (1, 300):  # the splits of a sum in parallel and in sequence
        x = launch.empty_rows(rows, HIDDEN, dtype=BF16, device=CPU)
        product.product(x, weight[:512], squares=torch.ones(rows, 4), eps=1e-6, invariant=True)
        product.product(x, weight[:1], invariant=True)
    fp8.pairs_of(torch.randn(1, HIDDEN).to(BF16))
    if capability >= 89:
        compile_single_row()
        numbers, scales = fp8.round_rows(torch.randn(4, HIDDEN).to(BF16), 448.0)
        if hopper:
            compile_pairs(weight.to(FP8))
        invariant.invariant_linear(numbers, weight.to(FP8), scales=(scales, torch.ones(2 * INNER)), out_dtype=BF16)


def compile_single_row() -> None:
    """Products of a row with weights in 8 bits, as deep as those of an 8B model."""
    scales, down = torch.ones(512), 4096 if brief else 14336
    for depth, gated, added in ((4096, False, False), (4096, True, False), (down, False, True)):
        x, weight = torch.randn(1, depth).to(BF16), torch.zeros(512, depth).to(FP8)
        squares, total = None if added else torch.ones(1, 1024), torch.zeros(1, 512, dtype=BF16) if added else None
        vector.vector_product(x, weight, scales, squares=squares, eps=1e-6, gated=gated, add_to=total)


def compile_pairs(weight: torch.Tensor) -> None:
    scales, split = torch.ones(2 * INNER), fp8.empty_pairs(24, INNER, CPU)
    for rows in (24,) if brief else (1, 9, 24):
        x = torch.randn(rows, HIDDEN).to(BF16)
        options: dict[str, Any] = {"weight_scales": scales, "out_dtype": BF16, "pairs_out": split}
        product.product(fp8.pairs_of(x), weight, squares=torch.ones(rows, 4), eps=1e-6, gated=True, **options)
        product.product(x, weight[:INNER], add_to=torch.zeros(rows, INNER, dtype=BF16), **options)


def compile_int4() -> None:
    for group, dtype in ((32, BF16),) if brief else ((32, BF16), (128, torch.float16)):
        scales = torch.ones(2 * INNER, HIDDEN // group).to(dtype)
        weight = store(torch.ones(2 * INNER, HIDDEN, dtype=torch.uint8), scales, scales if group == 32 else None, group)
        int4.dequantize(weight, dtype)
        for rows in BATCH_SIZES if brief else (*BATCH_SIZES, 130):
            x = launch.empty_rows(rows, HIDDEN, dtype=dtype, device=CPU)
            int4.int4_product(x, weight, squares=torch.ones(rows, 4), eps=1e-6, gated=True)
            total = launch.empty_rows(rows, 2 * INNER, dtype=dtype, device=CPU)
            int4.int4_product(x, weight, add_to=total, next_norm=torch.ones(2 * INNER, dtype=dtype))
    for group, depth, has_offsets in ((128, HIDDEN, False), (128, 2304, False), (32, 2304, True)):
        scales, norm = torch.ones(HIDDEN, depth // group).to(BF16), torch.ones(HIDDEN, dtype=BF16)
        numbers = torch.ones(HIDDEN, depth, dtype=torch.uint8)
        weight = store(numbers, scales, scales if has_offsets else None, group)
        x, total = torch.randn(1, depth).to(BF16), torch.randn(1, HIDDEN).to(BF16)
        int4.int4_product(x, weight, add_to=total, next_norm=norm)
        if group == 128:
            int4.int4_product(x, weight, gated=True)
    for kernel in int4.int4_vector_kernel.device_caches[0][0].values():
        check_neighbours(kernel.asm["ttgir"])


def check_neighbours(text: str) -> None:
    """The PTX of `int4_vector_kernel` takes two elements of a thread for neighbours in a row."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg.blocked<\{sizePerThread = \[([\d, ]+)\]", text, re.MULTILINE))
    pairs = [line for line in text.splitlines() if "elementwise_inline_asm" in line and "packed_element = 2" in line]
    used = {layout for line in pairs for layout in re.findall(r"tensor<[^<>]*(#\w+)>", line)}
    assert used
    assert all(layouts[each].split(", ")[-1] == "2" for each in used)


def compile_layers() -> None:
    x, weight = torch.randn(4, HIDDEN).to(BF16), torch.ones(HIDDEN, dtype=BF16)
    norms.rms_norm(x, weight, 1e-6)
    norms.add_rms_norm_(x, x.clone(), weight, 1e-6)
    norms.add_rms_norm_(x, x.clone(), weight, 1e-6, after=weight, after_eps=1e-6, scalar=weight[:1])
    norms.add_rms_norm_(x, x.clone(), None, 0.0, after=weight, after_eps=1e-6)
    norms.norm_parts_(x, weight[:512], weight[512:768], 1e-6)
    layers.add_gated_(x, x.clone(), x.clone(), weight[None])
    for name in activation.ACTIVATIONS:
        activation.gated_mul(torch.randn(4, 2 * INNER).to(BF16), name)
    activation.softcap(torch.randn(4, VOCAB).to(BF16), 30.0)
    ints = torch.zeros(4, dtype=torch.int32)
    tables = torch.zeros(8, 16, dtype=torch.int32)
    layers.begin_step(ints, ints, ints, ints, ints, tables)
    scales = {"projected_scale": 0.1, "stored_scale": 16.0, "scale": 0.7}
    norms.per_layer_inputs_(ints, torch.randn(8, HIDDEN).to(BF16), x, weight[:256], 1e-6, **scales)
    layers.embed(ints, torch.randn(VOCAB, HIDDEN).to(BF16), 1.0)
    cos, sin = layers.rotation(ints, torch.ones(DIM // 2), 1.0, BF16)
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * DIM).to(BF16)
    norm = torch.ones(DIM, dtype=BF16)
    for cache in (BF16, FP8) if capability >= 89 else (BF16,):
        keys = torch.zeros(16, 16, KV_HEADS, DIM).to(cache)
        layers.rotate_and_store_(
            qkv, keys, keys.clone(), Fresh(norm, norm, 1e-6, cos, sin), num_heads=HEADS,
            slots=ints, positions=ints, tables=tables,
        )  # fmt: skip
        # Values that are the keys, and keys and values that are stored already.
        for heads in (HEADS + KV_HEADS,) if brief else (HEADS + KV_HEADS, HEADS):
            layers.rotate_and_store_(
                qkv[:, : heads * DIM].contiguous(), keys, keys.clone(),
                Fresh(norm, norm, 1e-6, cos, sin, v_norm=True), num_heads=HEADS, slots=ints, positions=ints,
                tables=tables,
            )  # fmt: skip


def compile_experts() -> None:
    num_experts, top_k, inner, x = 8, 2, 256, torch.randn(4, HIDDEN).to(BF16)
    experts = torch.zeros(4, top_k, dtype=torch.int64)
    tiling = tiling_for(8, num_experts, BF16, "plain", CPU, invariant=False).inner
    groups = routing.group_by_expert(experts, num_experts, tiling.rows, torch.zeros(4, dtype=torch.int32))
    many = torch.zeros(routing.FEW_PAIRS, top_k, dtype=torch.int64)
    routing.group_by_expert(many, num_experts, tiling.rows, torch.zeros(len(many), dtype=torch.int32))
    pairs = products.grouped_linear(
        x, ExpertMatrix(torch.randn(num_experts, inner, HIDDEN).to(BF16)), groups, tiling, top_k
    )
    share = torch.ones(8, dtype=BF16)
    large = tiling_for(200 * num_experts, num_experts, BF16, "plain", CPU, invariant=False)
    products.grouped_linear(
        x, ExpertMatrix(torch.randn(num_experts, inner, HIDDEN).to(BF16)), groups, large.inner, top_k, gate=Gate()
    )
    down = ExpertMatrix(torch.randn(num_experts, HIDDEN, inner).to(BF16))
    for bias in (None, torch.zeros(num_experts, HIDDEN).to(BF16)):
        found = products.grouped_linear(pairs, down, groups, tiling, top_k, scatter=True, bias=bias, share=share)
        products.add_up(found, top_k)
    activation.clamped_mul(torch.cat((pairs, pairs), dim=1), 1.702, 7.0)
    few: dict[str, Any] = {"scatter": True, "share": share, "sum_tokens": True}
    forms = [(ExpertMatrix(torch.zeros(num_experts, 2 * inner, HIDDEN).to(BF16)), down)]
    forms.append((four_bits(num_experts, 2 * inner, HIDDEN), four_bits(num_experts, HIDDEN, inner)))
    for rows in (4, 100) if brief else (4, 8, 20, 100, 200):
        both = tiling_for(rows * num_experts, num_experts, BF16, "mxfp4", CPU, invariant=False)
        products.grouped_linear(pairs, forms[-1][1], groups, both.outer, top_k, scatter=True, share=share)
    if capability >= 89:
        forms.append((eight_bits(num_experts, 2 * inner, HIDDEN), eight_bits(num_experts, HIDDEN, inner)))
        numbers, scales = fp8.round_rows(pairs, 448.0)
        rounded: dict[str, Any] = {"x_scales": scales, "out_dtype": BF16, "scatter": True, "share": share}
        wide = tiling_for(100 * num_experts, num_experts, BF16, "fp8", CPU, invariant=False).inner
        products.grouped_linear(numbers, forms[-1][1], groups, wide, top_k, **rounded)
    for form, (both, outer) in zip(("plain", "mxfp4", "fp8"), forms, strict=False):
        tilings = few_rows_tiling(4, BF16, form)
        for gate in (Gate(), Gate(1.702, 7.0)):
            products.grouped_linear(x, both, groups, tilings.inner, top_k, gate=gate)
        products.grouped_linear(pairs, outer, groups, tilings.outer, top_k, **few)
        one = routing.Grouping(*(each[:top_k] for each in groups))  # of a single token
        products.grouped_linear(pairs[:top_k], outer, one, few_rows_tiling(1, BF16, form).outer, top_k, **few)
    first = SharedMatrix(torch.zeros(4 * inner, HIDDEN).to(BF16), None, 2)
    second = SharedMatrix(torch.zeros(HIDDEN, 2 * inner).to(BF16), None, 2)
    for rows in (64,) if brief else (tiling.rows, 64):
        shared: dict[str, Any] = {"shared_rows": rows}
        products.grouped_linear(x, forms[0][0], groups, tiling, top_k, gate=Gate(), shared=first, **shared)
        products.grouped_linear(pairs, down, groups, tiling, top_k, scatter=True, share=share, shared=second, **shared)


def eight_bits(*shape: int) -> ExpertMatrix:
    return ExpertMatrix(torch.zeros(shape).to(FP8), torch.ones(shape[:2]))


def four_bits(experts: int, rows: int, columns: int) -> ExpertMatrix:
    chunks = num_chunks(columns)
    words = torch.zeros(experts, rows // PANEL, chunks, PANEL, RUN, dtype=torch.int16)
    return ExpertMatrix(words, torch.zeros(experts, chunks, rows, dtype=torch.int32))


def compile_routing() -> None:
    bias = torch.zeros(160)
    for sigmoid, groups, best in ((True, 8, 2), (False, 1, 1)):
        rule = routing.RouteRule(8, sigmoid, True, 1e-20, 2.5, groups, min(groups, 3), best)
        routing.route(torch.zeros(4, 160), bias if sigmoid else None, BF16, rule)
        weight = torch.zeros(160, HIDDEN).to(torch.float32 if sigmoid else BF16)
        for tokens in (4,) if brief else (1, 4):
            few_rows.route_and_group(
                torch.zeros(tokens, HIDDEN).to(BF16),
                weight,
                None,
                bias if sigmoid else None,
                rule,
                torch.zeros(tokens, dtype=torch.int32),
            )


def compile_latent() -> None:
    """DeepSeek V3 with 128 heads, and V2-Lite with 16."""
    rank, nope, rope, value, ints = 512, 128, 64, 128, torch.zeros(4, dtype=torch.int32)
    tables = torch.zeros(4, 4, dtype=torch.int32)
    chunks = Chunks(tables, ints, ints, ints, ints, ints, ints, 64)
    combinations = [(128, CACHES[:1], [4]), (16, CACHES[-1:], [16])]
    for heads, caches, numbers in combinations if brief else [(128, CACHES, [4, 16]), (16, CACHES, [4, 16])]:
        q = torch.zeros(4, heads, nope + rope).to(BF16)
        latent = torch.zeros(4, rank + rope).to(BF16)
        sums, out = torch.zeros(4, heads, rank).to(BF16), torch.zeros(4, heads, value).to(BF16)
        lse, norm, angles = torch.zeros(4, heads), torch.ones(rank).to(BF16), torch.ones(4, rope // 2).to(BF16)
        scratch, up = absorbed.LatentScratch(heads, rank, CPU), torch.zeros(heads, nope + value, rank).to(BF16)
        for cache_type in caches:
            cache = torch.zeros(8, 16, 1, rank + rope).to(cache_type)
            new = NewLatents(norm, 1e-6, angles, angles, ints, ints, tables)
            prepare_latents_(q, latent, cache, new)
            prepare_and_absorb_(q, latent, up, cache, new)
            where = {"chunks": chunks, "scale": 1.0}
            for splits in numbers:
                absorbed.attend_singles(
                    sums, q[..., nope:], cache, sums, rows=4, scratch=scratch, splits=splits, **where
                )
            absorbed.attend_contexts(sums, q[..., nope:], cache, sums, lse, **where)
        values_of(sums, up, nope)
        kv = torch.zeros(4, heads, nope + value).to(BF16)
        attend_within_chunks(q, kv, latent[:, rank:], out, lse, chunks=chunks, scale=1.0)
    if hopper:
        cache, hopper_scratch = torch.zeros(8, 16, 1, rank + rope).to(BF16), hopper_decode.HopperScratch(16, rank, CPU)
        hopper_decode.attend_singles(sums, q[..., nope:], cache, sums, rows=4, scratch=hopper_scratch, **where)


def compile_recurrent() -> None:
    rows, width, heads = 80, 4, 4
    x = torch.zeros(rows, 6 * heads * DIM).to(BF16)
    states = torch.zeros(3, width - 1, 3 * heads * DIM), torch.zeros(3, heads, DIM, DIM)
    q, k, v = (part.unflatten(1, (heads, DIM)) for part in x[:, : 3 * heads * DIM].chunk(3, dim=1))
    gate, norm = x[:, -heads * DIM :], torch.ones(DIM)
    for longest in (1, 79):  # a decode, a prompt
        starts, read = as_ints([0, longest], CPU), as_ints([0], CPU)
        batch = RecurrentBatch(starts, read, as_ints([-1] * rows, CPU), longest=longest)
        convolve(x[:, : 3 * heads * DIM], torch.ones(width, 3 * heads * DIM), None, states[0], batch, silu=True)
        for rule in (RecurrenceRule(delta=True, normalize=True), RecurrenceRule(delta=False)):
            for rate in (x[:, :heads],) if brief else (x[:, :heads], None):
                gates = RawGates(x[:, :heads], rate, torch.ones(heads), torch.ones(heads), (0.0, 1.0))
                run_recurrence(q, k, v, gates, rule, states[1], batch, torch.ones(heads), sequential=False)
        wide = RawGates(x[:, : heads * DIM], x[:, :heads], torch.ones(heads), torch.ones(heads * DIM), (0.0, 1.0))
        run_recurrence(q, k, v, wide, RecurrenceRule(delta=True), states[1], batch, None, sequential=False)
    for order in (GateOrder(), GateOrder(first=True)):
        gated_norm(x[:, : heads * DIM].contiguous(), gate, norm, DIM, 1e-6, order)


def compile_adapters() -> None:
    a, b = torch.zeros(8, HIDDEN).to(BF16), torch.zeros(8, INNER).to(BF16)
    table = torch.zeros(2, 1, WIDTH, dtype=torch.int64)
    table[1, 0] = torch.tensor(entry(a, [(0, b)]))
    for rows in (FEW_ROWS, 8 * FEW_ROWS):
        x, out = torch.zeros(rows, HIDDEN).to(BF16), torch.zeros(rows, INNER).to(BF16)
        slots = torch.ones(rows, 1, dtype=torch.int32)
        add_terms(x, out, table, 0, slots, torch.ones(rows, 1), None, BF16)


def compile_drafts() -> None:
    scores, ids, found = torch.randn(4, VOCAB).to(BF16), torch.zeros(VOCAB, dtype=torch.int64), as_ints([0] * 4, CPU)
    likeliest(scores, None, found, found.clone(), 8)
    likeliest(scores, ids, found, found.clone(), 8)
    states = torch.randn(4, HIDDEN).to(BF16)
    store_states([states], found, found, torch.zeros(4 * 64 + 1, HIDDEN).to(BF16), 64)
    draft_inputs(found, torch.randn(VOCAB, HIDDEN).to(BF16), 1.0, torch.randn(4, HIDDEN).to(BF16), 1e-6)


def compile_sampling() -> None:
    ints, floats = torch.zeros(4, dtype=torch.int32), torch.ones(4)
    sampling.sample(
        torch.randn(4, VOCAB).to(BF16), tokens=ints, last_token=ints, slots=ints, temperature=floats, top_k=ints,
        top_p=floats, min_p=floats, uniforms=floats,
    )  # fmt: skip


for compile_some in (
    compile_attention,
    compile_products,
    compile_int4,
    compile_layers,
    compile_experts,
    compile_routing,
    compile_latent,
    compile_recurrent,
    compile_adapters,
    compile_drafts,
    compile_sampling,
):
    compile_some()
print(json.dumps(sorted(set(compiled))))
