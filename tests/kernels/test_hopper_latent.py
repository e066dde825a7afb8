"""The kernel of latent attention on Hopper, as far as a CPU can show it: choice, schedule, joining of parts.

Gluon has no interpreter: tests/gpu/test_latent.py compares the kernel itself with float64.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.kernels.gpu import GPUS, META, described_gpu
from chairlift.kernels.triton import launch
from chairlift.kernels.triton.attention import Chunks
from chairlift.kernels.triton.latent import absorbed, hopper_decode, hopper_kernel
from chairlift.kernels.triton.launch import generic_kernels
from tests.kernels.attention_cases import as_ints
from tests.kernels.test_triton_latent import error, make_case, run

CPU, BF16 = torch.device("cpu"), torch.bfloat16
DEEPSEEK: dict[str, Any] = {"rank": 512, "nope": 128, "rope": 64, "value": 128, "block_size": 16, "dtype": BF16}
TILE = hopper_kernel.N.value


def tensors(
    heads: int = 16, rope: int = 64, block_size: int = 16, cache: torch.dtype = BF16, q: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, their rotated parts and a cache without memory."""
    queries, rotated = (torch.empty(4, heads, size, dtype=q, device=META) for size in (512, rope))
    return queries, rotated, torch.empty(8, block_size, 1, 512 + rope, dtype=cache, device=META)


@pytest.mark.parametrize(
    ("given", "rows", "reason"),
    [
        ({}, 4, None),
        ({"heads": 8, "block_size": 32}, 2048, None),
        ({"heads": 128}, 4, "16 heads"),
        ({"rope": 32}, 4, "rotated parts"),
        ({"block_size": 8}, 4, "blocks"),
        ({"cache": torch.float8_e4m3fn}, 4, "bfloat16"),
        ({"cache": torch.float16, "q": torch.float16}, 4, "bfloat16"),
        ({}, 2049, "rows"),
    ],
)
def test_what_the_kernel_takes(given: dict[str, Any], rows: int, reason: str | None) -> None:
    with described_gpu(GPUS["h200"]):
        found = hopper_decode.obstacle(*tensors(**given), rows=rows)
    assert found is None if reason is None else found is not None and reason in found


def test_other_devices_have_no_scratch_memory_for_it() -> None:
    layer = AttentionLayer(0, 16, 1, 576, 1.0, latent_dim=512)
    with described_gpu(GPUS["a100"]):
        assert hopper_decode.obstacle(*tensors(), rows=4) == "it runs on GPUs of compute capability 9.0"
        assert PagedGPUAttention().hopper_scratch(layer, META) is None
    with described_gpu(GPUS["h200"]):
        assert PagedGPUAttention().hopper_scratch(layer, META) is not None
    assert PagedGPUAttention().hopper_scratch(layer, CPU) is None


def test_steps_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the formula in its place: only single tokens with tuned kernels and a cache in 16 bits reach it."""
    calls = []

    def attend(
        q: Tensor, q_rope: Tensor, cache: Tensor, out: Tensor, *, rows: int, scratch: object, **rest: Any
    ) -> None:
        calls.append(rows)
        absorbed.attend_singles(q, q_rope, cache, out, rows=rows, scratch=absorbed.LatentScratch(16, 512, CPU), **rest)

    case = make_case([20, 5, 0], [1, 1, 18], heads=16, device=CPU, **DEEPSEEK)
    expected = run(case, padding=2)
    assert calls == []
    monkeypatch.setattr(launch, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(hopper_decode, "layer_obstacle", lambda *shape: None)
    monkeypatch.setattr(hopper_decode, "attend_singles", attend)
    assert error(run(case, padding=2), expected) == 0
    assert calls == [4]
    with generic_kernels():
        run(case, padding=2)
    case.cache = case.cache.to(torch.float8_e4m3fn)
    run(case, padding=2)
    assert calls == [4]


def test_every_tile_has_one_program() -> None:
    begin_of, owner_of = hopper_kernel._begin_of.fn, hopper_kernel._owner_of.fn
    for total in (1, 2, 131, 132, 133, 1000, 65537):
        programs = min(132, total)
        assert (begin_of(0, total, programs), begin_of(programs, total, programs)) == (0, total)
        for tile in range(total) if total < 2000 else random.Random(0).sample(range(total), 500):
            owner = owner_of(tile, total, programs)
            assert begin_of(owner, total, programs) <= tile < begin_of(owner + 1, total, programs)


@pytest.mark.parametrize("programs", [4, 7, 132])
@pytest.mark.parametrize(
    "lengths",
    [[5000], [65], [0, 0, 200, 0, 129, 128, 0, 900, 0, 0], [1, 63, 64, 65, 100, 640, 1000, 2047, 17, *[70] * 9]],
    ids=["one", "two tiles", "padding", "many"],
)
def test_parts_are_joined(lengths: list[int], programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the schedule gives to each program, computed by the formula, and the kernel that joins them."""
    monkeypatch.setattr(hopper_decode, "num_multiprocessors", lambda device: programs)
    torch.manual_seed(0)
    heads, rank = 2, 64
    scratch = hopper_decode.HopperScratch(heads, rank, CPU)
    out = torch.full((len(lengths), heads, rank), torch.nan)
    expected = torch.full_like(out, torch.nan)
    ends = torch.tensor([-(-length // TILE) for length in lengths]).cumsum(0).tolist()
    used = min(programs, ends[-1])
    for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        base = end - -(-length // TILE)
        scores, values = torch.randn(heads, length) * 3, torch.randn(length, rank)
        if length:
            expected[row] = scores.softmax(-1) @ values
        owners = sorted({hopper_kernel._owner_of.fn(tile, ends[-1], used) for tile in range(base, end)})
        for owner in owners:
            first, last = (hopper_kernel._begin_of.fn(owner + i, ends[-1], used) - base for i in (0, 1))
            here = slice(max(0, first) * TILE, last * TILE)
            part = scores[:, here].softmax(-1) @ values[here]
            if len(owners) == 1:
                out[row] = part
                continue
            at = 2 * owner + (first <= 0)
            scratch.partial[at] = part
            scratch.lse[at] = scores[:, here].logsumexp(-1) / torch.tensor(2.0).log()
        if owners:
            scratch.meta[row] = owners[0] * hopper_kernel.META_PARTS.value + len(owners)
    counts = as_ints([int(length > 0) for length in lengths], CPU)
    chunks = Chunks(*[counts] * 7, 64)
    hopper_decode._join(out, len(lengths), chunks, scratch)
    real = [row for row, length in enumerate(lengths) if length]
    assert torch.allclose(out[real], expected[real], atol=1e-5)
