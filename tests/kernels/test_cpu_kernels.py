"""CPU kernels against exact integers or float64, over random shapes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from chairlift.attention.paged.cpu import as_array
from chairlift.attention.storage import as_plain, narrowed, widened
from chairlift.kernels.cpu import simd as cpu_simd
from chairlift.kernels.cpu.attention import Cache, Score
from chairlift.kernels.cpu.attention_work import FEW, share_pieces, split_work
from chairlift.kernels.cpu.compiling import exp, narrow, widen
from chairlift.kernels.cpu.decoder import attend_layer, linear
from chairlift.kernels.cpu.int8 import PackedWeight, Rows, round_row
from chairlift.kernels.cpu.simd import AVX2, GROUP, PANEL, PLAIN, SPAN, VNNI_256, VNNI_512, InstructionSet, int8_tile
from chairlift.kernels.cpu.threads import Team, barrier, claim, the_team
from chairlift.kernels.cpu.weights import multiplied

torch = pytest.importorskip("torch")

NEEDS = {VNNI_512: "avx512vnni", VNNI_256: "avxvnni", AVX2: "avx2", PLAIN: None}


@pytest.mark.parametrize("isa", NEEDS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("count", range(1, 9))
def test_tiles_of_every_instruction_set_are_exact(isa: InstructionSet, count: int) -> None:
    if count > isa.few_rows:
        pytest.skip("no tile has so many rows")
    needed = NEEDS[isa]
    if needed is not None and not cpu_simd._FEATURES.get(needed) and not cpu_simd._FEATURES.get("avx512vnni"):
        pytest.skip(f"this CPU has no {isa.name}")
    spans, random = 3, np.random.default_rng(count)
    left = random.integers(-127, 128, (count, spans * SPAN)).astype(np.int16 if isa.wide_rows else np.int8)
    weight = random.integers(0, 256, (isa.panels, spans * SPAN // GROUP, PANEL, GROUP)).astype(np.uint8)
    left[0], weight[0] = 127, 255  # the largest possible sums
    scales = np.ldexp(np.float32(1), random.integers(0, 2, (count, spans)))  # powers of two keep float32 exact
    starts = random.integers(-1000, 1000, (count, spans)).astype(np.int32)
    tile, strides = int8_tile(isa, count), (left.strides[0], weight.strides[0])

    @njit
    def run(sums: Any, left: Any, scales: Any, starts: Any, weight: Any) -> None:
        sides = left.ctypes.data, strides[0], scales.ctypes.data, starts.ctypes.data, spans
        tile(sums.ctypes.data, *sides, weight.ctypes.data, strides[1])

    sums = np.full((count, isa.panels * PANEL), np.nan, dtype=np.float32)
    run(sums, left, scales, starts, weight)
    columns = weight.transpose(1, 3, 0, 2).reshape(spans, SPAN, -1).astype(np.int64)
    products = np.einsum("rsd,sdc->rsc", left.reshape(count, spans, SPAN).astype(np.int64), columns)
    assert np.array_equal(sums, ((products + starts[..., None]) * scales[..., None].astype(np.float64)).sum(axis=1))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    depth=st.sampled_from([4, 8, 30, 64, 132]),
    channels=st.integers(1, 130),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_with_8_bit_weights(rows: int, depth: int, channels: int, biased: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, depth), dtype=np.float32)
    weight = random.standard_normal((channels, depth), dtype=np.float32)
    bias = random.standard_normal(channels, dtype=np.float32) if biased else None
    packed = PackedWeight.empty(1, channels, depth).layer(0)
    packed.fill(weight)

    def multiply(some: np.ndarray) -> np.ndarray:
        added = None if bias is None else torch.from_numpy(bias)
        found: np.ndarray = multiplied(linear, torch.from_numpy(some), packed, added, channels).numpy()
        return found

    # The expected result of rounding to 8 bits, computed differently.
    weight_scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    spans = np.arange(0, depth, SPAN)
    x_scale = np.repeat(np.maximum.reduceat(np.abs(x), spans, axis=1) / 127, np.diff(spans, append=depth), axis=1)
    rounded = np.rint(x.astype(np.float64) / x_scale) * x_scale
    expected = rounded @ np.rint(weight.astype(np.float64) / weight_scale).T * weight_scale.T
    expected += 0 if bias is None else bias
    found = multiply(x)
    # A tie may round the other way: one step of one factor.
    assert np.abs(found - expected).max() < 1e-4 * depth + 2 * float(x_scale.max() * np.abs(weight).max())
    assert np.abs(found - expected).mean() < 0.02
    # Each row is independent of the others.
    for row in random.choice(rows, size=min(rows, 4), replace=False):
        assert np.array_equal(multiply(x[row : row + 1])[0], found[row])


def test_a_non_finite_row_stays_so_and_affects_no_other() -> None:
    x = np.ones((3, 8), dtype=np.float32)
    x[1, 3] = np.nan
    x[2] = 0.0
    packed = PackedWeight.empty(1, 16, 8).layer(0)
    packed.fill(np.ones((16, 8), dtype=np.float32))
    found = multiplied(linear, torch.from_numpy(x), packed, None, 16).numpy()
    assert np.allclose(found[0], 8.0)
    assert np.isnan(found[1]).all()
    assert (found[2] == 0).all()


def test_rounding_a_row_keeps_the_largest_number_of_each_span() -> None:
    rows = Rows.empty(1, SPAN + 6)
    values = np.zeros(SPAN + 6, dtype=np.float32)
    values[:2], values[SPAN:] = (1000.0, 500.0), (0.0, -2.54, 1.0, 0.01, -0.009, 2.0)
    round_row(values, rows, 0)
    assert rows.numbers[0, : SPAN + 6].tolist() == [127, 64] + [0] * (SPAN - 2) + [0, -127, 50, 0, 0, 100]
    assert rows.starts[0].tolist() == [-128 * 191, -128 * 23]
    assert np.allclose(rows.scales[0], [1000 / 127, 0.02])


def test_exp_is_accurate() -> None:
    @njit
    def each(values: Any) -> None:
        for i in range(values.shape[0]):
            values[i] = exp(values[i])

    x = np.linspace(-86.9, 87.9, 100_001, dtype=np.float32)
    found = x.copy()
    each(found)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(found / exact - 1).max() < 3e-7
    ends = np.array([-np.inf, -1e30, -100.0, 0.0, np.nan], dtype=np.float32)
    each(ends)
    assert ends[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(ends[4])


def test_bfloat16_rounds_as_torch_does() -> None:
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32) * 100

    @njit
    def there_and_back(values: Any, halves: Any) -> None:
        for i in range(values.shape[0]):
            halves[i] = narrow(values[i], halves[i])
            values[i] = widen(halves[i])

    found = x.copy()
    there_and_back(found, np.zeros(1000, dtype=np.uint16))
    assert np.array_equal(found, torch.from_numpy(x).bfloat16().float().numpy())


@njit(nogil=True)
def _work(shared: Any, members: int, done: Any) -> None:
    """Work items of a phase depend on all items of the phase before."""
    for turn in range(done.shape[0]):
        while True:
            piece = claim(shared, 1)
            if piece >= done.shape[1]:
                break
            done[turn, piece] += 1 if turn == 0 or done[turn - 1].all() else 100
        barrier(shared, members)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_team_does_every_work_item_once_and_phases_in_order(size: int) -> None:
    team = Team(size)
    for _ in range(20):
        done = np.zeros((30, 10), dtype=np.int64)
        team.run(_work, done)
        assert (done == 1).all()


_lone = threading.Lock()


def _fail_alone(shared: Any, members: int, done: Any) -> None:
    """One thread fails while the other waits at the barrier."""
    if _lone.acquire(blocking=False):
        raise ValueError("only one of us")
    _work(shared, members, done)


def test_concurrent_callers_are_serialised_and_errors_reach_them() -> None:
    team = Team(2)

    def fail(shared: Any, members: int) -> None:
        raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        team.run(fail)
    with pytest.raises(ValueError, match="only one"):
        team.run(_fail_alone, np.zeros((5, 3), dtype=np.int64))
    work = [np.zeros((50, 7), dtype=np.int64) for _ in range(4)]
    threads = [threading.Thread(target=team.run, args=(_work, done)) for done in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all((done == 1).all() for done in work)


def test_an_interrupted_wait_leaves_the_team_usable() -> None:
    """As by Ctrl-C while the caller waits for a worker that takes longer."""
    team = Team(2)
    caller, free = threading.current_thread(), threading.Event()

    def wait(shared: Any, members: int) -> None:
        if threading.current_thread() is not caller:
            free.wait(30)

    def interrupt(number: int, frame: Any) -> None:
        free.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            team.run(wait)
    finally:
        signal.signal(signal.SIGALRM, before)
    done = np.zeros((30, 10), dtype=np.int64)
    again = threading.Thread(target=lambda: [team.run(_work, done) for _ in range(3)], daemon=True)
    again.start()
    again.join(timeout=30)
    assert not again.is_alive()
    assert (done == 3).all()


def test_a_forked_process_has_a_team_of_its_own() -> None:
    team = Team(3)
    done = np.zeros((30, 10), dtype=np.int64)
    team.run(_work, done)

    def run_again() -> None:
        for _ in range(3):
            team.run(_work, done)
        sys.exit(int(done.sum() != 4 * done.size))

    with team._lock:  # as while another thread runs a kernel
        child = multiprocessing.get_context("fork").Process(target=run_again)
        child.start()
    child.join(timeout=30)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0


RESTRICTED = """
import numpy as np
from numba import njit
from chairlift.kernels.cpu import simd as cpu_simd

isa = cpu_simd.find_instruction_set()
tile, keys_tile = cpu_simd.int8_tile(isa, 1), cpu_simd.keys_tile(1)

@njit
def run(sums, left, right, products, numbers, ones, nothing, weight):
    keys_tile(sums.ctypes.data, 64, left.ctypes.data, 64, right.ctypes.data, 64, 64, 0, np.float32(0))
    sides = numbers.ctypes.data, 64, ones.ctypes.data, nothing.ctypes.data, 1
    tile(products.ctypes.data, *sides, weight.ctypes.data, 1024)

sums, left, ones = np.zeros(cpu_simd.KEY_TILE, np.float32), np.ones(64, np.float32), np.ones(1, np.float32)
products, numbers = np.zeros(isa.panels * 16, np.float32), np.ones(64, np.int16 if isa.wide_rows else np.int8)
right, weight = np.ones((cpu_simd.KEY_TILE, 64), np.float32), np.full(1024 * isa.panels, 3, np.uint8)
run(sums, left, right, products, numbers, ones, np.zeros(1, np.int32), weight)
assert (sums == 64).all() and (products == 192).all(), (sums, products)
text = "".join(run.inspect_asm().values())
print(isa.name, cpu_simd.LANES, "zmm" in text, "ymm" in text, "fmaf" in text)
"""


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, f"{PLAIN.name} 8 False False False"),
        ({"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+avx,+avx2,-fma"}, f"{AVX2.name} 8 False True False"),
    ],
    ids=["generic", "AVX2 without FMA"],
)
def test_kernels_use_no_instruction_that_numba_must_avoid(setting: dict[str, str], found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTRICTED], env=os.environ | setting, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == found


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_a_square_of_either_type_is_transposed(kind: Any) -> None:
    numbers = np.arange(16 * 20).reshape(16, 20).astype(np.float32)
    source = numbers if kind is np.float32 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    target = np.zeros((16, 24), dtype=np.float32)

    @njit
    def run(source: Any, target: Any) -> None:
        cpu_simd.transpose_16(target.ctypes.data, 24, source.ctypes.data, 20, source[0, 0])

    run(source[:, :], target)
    expected = numbers if kind is np.float32 else (source.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(target[:, :16], expected[:, :16].T)
    assert (target[:, 16:] == 0).all()


SHAPES: dict[
    str, tuple[int, int, int, int, dict[str, Any]]
] = {  # heads, KV heads, numbers of a head, tokens of a block
    "whole tiles": (6, 2, 64, 16, {}),
    "eight heads share keys": (16, 2, 64, 16, {"window": 90, "sinks": True}),
    "small blocks": (7, 1, 64, 4, {"chunk": 150, "softcap": 20.0}),
    "small heads": (4, 4, 20, 8, {"window": 300}),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_however_a_prompt_is_cut(shape: str, kind: Any) -> None:
    """Token by token, with drafts, in chunks and at once. The cuts are at every place of a block and a tile."""
    heads, kv_heads, head_dim, block_size, own = SHAPES[shape]
    random, count = np.random.default_rng(3), 330
    tables = random.permutation(-(-count // block_size)).astype(np.int32)[None]
    empty = torch.zeros(tables.size, block_size, kv_heads, head_dim)
    cache = Cache(*(as_array(narrowed(empty, kind)) for _ in range(2)), tables)
    q = random.normal(size=(count, heads, head_dim)).astype(np.float32)
    k, v = random.normal(size=(2, count, kv_heads, head_dim)).astype(np.float32)
    positions = np.arange(count)
    slots = tables[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sinks = random.normal(size=heads if own.get("sinks") else 0).astype(np.float32)
    softcap = np.float32(own.get("softcap", 0.0))
    how = Score(np.float32(0.25), own.get("window", 0), softcap, own.get("chunk", 0), sinks)

    def attend(cuts: Sequence[int], few: int = FEW) -> np.ndarray:
        parts = []
        for first, last in itertools.pairwise(cuts):
            rows = slice(first, last)
            parts.append(np.empty_like(q[rows]))
            spans = np.array([0, last - first]), np.array([first]), np.array([last])
            work = split_work(*spans, heads, head_dim, few=few)
            the_team().run(attend_layer, q[rows], k[rows], v[rows], slots[rows], cache, work, how, parts[-1])
        return np.concatenate(parts)

    whole = attend([0, count])
    assert np.isfinite(whole).all()
    assert np.array_equal(attend([0, count], few=count), whole), "row by row"
    assert np.array_equal(attend([0, count], few=0), whole), "tiles"
    assert np.array_equal(attend(range(count + 1)), whole), "single tokens"
    assert np.array_equal(attend([0, 17, 64, 65, 70, 130, 255, 257, 275, 299, count]), whole), "chunks and drafts"


@pytest.mark.parametrize("window", [0, 300])
def test_pieces_that_rows_share_have_the_same_bits(window: int) -> None:
    """Some rows share one piece, some two, one none; one sequence has drafts; more rows share than a tile has."""
    heads, kv_heads, head_dim, block_size, per = 6, 2, 64, 16, 40
    random, count = np.random.default_rng(5), 72
    tables = random.permutation(count * per).astype(np.int32).reshape(count, per)
    tables[1:70, :16] = tables[0, :16]
    tables[1:6, 16:32] = tables[0, 16:32]
    tables[71, 0] = tables[0, 0]  # the first block of a piece, but not the others
    starts = random.integers(515, 600, count)
    ends = starts + np.where(np.arange(count) == 70, 6, 1)
    offsets = np.concatenate([[0], np.cumsum(ends - starts)])
    q = random.normal(size=(offsets[-1], heads, head_dim)).astype(np.float32)
    k, v = random.normal(size=(2, offsets[-1], kv_heads, head_dim)).astype(np.float32)
    cache = Cache(*random.normal(size=(2, tables.size, block_size, kv_heads, head_dim)).astype(np.float32), tables)
    positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    tokens_of = np.repeat(np.arange(count), ends - starts)
    slots = tables[tokens_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    how = Score(np.float32(0.25), window, np.float32(0.0), 0, np.empty(0, np.float32))
    alone = split_work(offsets, starts, ends, heads, head_dim)
    shared = share_pieces(alone, tables, block_size)
    assert sorted(shared.shared.counts.tolist()) == [6, 6, 6, 6, 64]
    assert len(shared.order) + shared.shared.counts.sum() == len(alone.order)
    results = [np.empty_like(q) for _ in range(2)]
    for work, out in zip((alone, shared), results, strict=True):
        the_team().run(attend_layer, q, k, v, slots, cache, work, how, out)
    assert np.array_equal(*results)
    assert share_pieces(alone, tables[:1], block_size) is alone
    assert share_pieces(alone, tables, 24) is alone, "blocks that do not fill a piece"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8])
def test_single_tokens_attend_as_in_float64(group: int, kind: Any) -> None:
    """Every number of query heads per KV head has its own tile. What blocks hold behind a sequence must not matter."""
    lengths, kv_heads, block_size = [300, 1, 45, 256], 2, 16
    for head_dim in (64, 80):
        generator = torch.Generator().manual_seed(group + head_dim)
        per = 20
        tables = torch.randperm(per * len(lengths), generator=generator).view(len(lengths), per)
        shape = (per * len(lengths), block_size, kv_heads, head_dim)
        sides = [torch.randn(shape, generator=generator) for _ in range(2)]
        q = torch.randn(len(lengths), group * kv_heads, head_dim, generator=generator)
        stored = [narrowed(side, kind) for side in sides]
        places = (tables[..., None] * block_size + torch.arange(block_size)).flatten(1)  # of each position
        slots = [int(own[length - 1]) for own, length in zip(places, lengths, strict=True)]
        exact = [widened(side, torch.float32).double().flatten(0, 1) for side in stored]
        new = [side.flatten(0, 1)[slots] for side in sides]
        for own, length in zip(places, lengths, strict=True):
            for side in stored:
                as_plain(side).flatten(0, 1)[own[length:]] = 127 if kind is torch.int8 else torch.nan
        out = np.empty((len(lengths), group * kv_heads, head_dim), dtype=np.float32)
        ends = np.array(lengths)
        work = split_work(np.arange(len(lengths) + 1), ends - 1, ends, *out.shape[1:])
        how = Score(np.float32(head_dim**-0.5), 0, np.float32(0.0), 0, np.empty(0, np.float32))
        cache = Cache(*(as_array(side) for side in stored), tables.int().numpy())
        the_team().run(attend_layer, q.numpy(), *(side.numpy() for side in new), np.array(slots), cache, work, how, out)
        for row, (own, length) in enumerate(zip(places, lengths, strict=True)):
            k, v = (side[own[:length]].repeat_interleave(group, dim=1) for side in exact)
            scores = torch.einsum("hd,nhd->hn", q[row].double(), k) * head_dim**-0.5
            expected = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), v)
            error = (torch.from_numpy(out[row]).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < (2e-4 if kind is torch.int8 else 1e-5), (head_dim, length, error)
