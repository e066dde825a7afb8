"""Latent attention on a GPU: the kernels in the shapes of DeepSeek V2-Lite and V3, and a model against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift.kernels.graphs import StepKernels
from chairlift.kernels.triton.attention import Chunks
from chairlift.kernels.triton.latent import hopper_decode
from tests.gpu.greedy import compare_rounded, generate, load_tiny
from tests.gpu.test_modes import WIDE
from tests.kernels.attention_cases import TOLERANCE
from tests.kernels.test_triton_latent import error, make_case, reference, run
from tests.models.checkpoints import SIZES, make_reference, save

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DEEPSEEK: dict[str, Any] = {"rank": 512, "nope": 128, "rope": 64, "value": 128, "block_size": 16, "device": DEVICE}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=["bfloat16", "fp8"])
def test_kernels(heads: int, cache: torch.dtype) -> None:
    for starts, counts in (
        ([0, 700, 9000], [1, 1, 1]),
        ([64, 8191, 30000], [1, 1, 1]),
        ([5, 300, 0, 1000], [1, 1, 130, 200]),
    ):
        case = make_case(starts, counts, heads=heads, dtype=torch.bfloat16, cache_dtype=cache, **DEEPSEEK)
        allowed = 2 * TOLERANCE[torch.bfloat16] if cache is torch.bfloat16 else 0.05
        assert error(run(case, tile_queries=64, padding=3), reference(case)) < allowed


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
RAGGED = {
    "one token": [1],
    "around a tile": [63, 64, 65, 1, 127, 129],
    "mixed": [1, 63, 64, 65, 100, 640, 1000, 2047, 4096, 30001, 17],
    "padding": [0, 0, 200, 0, 129, 128, 0, 5000, 0, 0],
    "one long": [65000],
    "few": [3000, 3001, 3002],
    "many": [100 + (i * 7919) % 1949 for i in range(256)],
}


class Decodes:
    """Rows of single tokens with DeepSeek's sizes; slots of the cache past their ends hold NaN."""

    def __init__(self, heads: int, rows: int, num_blocks: int) -> None:
        torch.manual_seed(rows)
        self.heads, self.rows, self.num_blocks = heads, rows, num_blocks
        self.cache = torch.empty(num_blocks, 16, 1, 576, device=DEVICE, dtype=torch.bfloat16)
        self.q = torch.randn(rows, heads, 512, device=DEVICE).bfloat16()
        self.q_rope = torch.randn(rows, heads, 192, device=DEVICE).bfloat16()[..., 128:]
        self.out = torch.empty(rows, heads, 512, device=DEVICE, dtype=torch.bfloat16)
        self.tables = torch.zeros(rows, 4100, dtype=torch.int32, device=DEVICE)
        ints = torch.zeros(3, rows, dtype=torch.int32, device=DEVICE)
        self.chunks = Chunks(self.tables, ints[0], ints[0], ints[0], ints[0], ints[1], ints[2], 64)
        self.scratch = hopper_decode.HopperScratch(heads, 512, DEVICE)

    def fill(self, lengths: list[int], seed: int = 0) -> None:
        """Take new lengths, with blocks in random order."""
        torch.manual_seed(seed)
        blocks, slots = torch.randperm(self.num_blocks), torch.randperm(self.rows)
        self.cache.normal_()
        self.tables.zero_()
        self.chunks.slot.copy_(slots)
        self.chunks.start.copy_(torch.tensor([max(0, length - 1) for length in lengths]))
        self.chunks.count.copy_(torch.tensor([int(length > 0) for length in lengths]))
        for slot, length in zip(slots.tolist(), lengths, strict=True):
            mine, blocks = blocks.split([-(-length // 16), len(blocks) - -(-length // 16)])
            self.tables[slot, : len(mine)] = mine
            if length % 16:
                self.cache[mine[-1], length % 16 :] = torch.nan
        self.cache[blocks.to(DEVICE)] = torch.nan
        self.out.fill_(torch.nan)

    def attend(self) -> None:
        hopper_decode.attend_singles(
            self.q, self.q_rope, self.cache, self.out, rows=self.rows, chunks=self.chunks,
            scale=192**-0.5, scratch=self.scratch,
        )  # fmt: skip

    def worst_row(self, lengths: list[int]) -> float:
        """The largest relative error of a row against float64."""
        torch.cuda.synchronize()
        errors = [0.0]
        for row, length in enumerate(lengths):
            if length:
                blocks = self.tables[self.chunks.slot[row], : -(-length // 16)].long()
                cached = self.cache[blocks].flatten(0, 1)[:length, 0].double()
                q = torch.cat((self.q[row], self.q_rope[row]), -1).double()
                expected = (q @ cached.T * 192**-0.5).softmax(-1) @ cached[:, :512]
                found = float((self.out[row].double() - expected).norm() / expected.norm())
                errors.append(found if found == found else torch.inf)
        return max(errors)


@HOPPER
@pytest.mark.parametrize("heads", [16, 5])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_decodes_on_hopper(name: str, heads: int) -> None:
    lengths = RAGGED[name]
    case = Decodes(heads, len(lengths), sum(-(-length // 16) for length in lengths) + 3)
    for seed in range(2):  # the second launch finds scratch memory as the first left it
        case.fill(lengths, seed)
        case.attend()
        assert case.worst_row(lengths) < 8e-3


@HOPPER
def test_a_captured_launch_serves_other_lengths() -> None:
    batches = [[40, 3000, 0, 64], [9000, 1, 65, 0], [0, 0, 0, 0], [17, 17, 17, 5000], [20000, 0, 0, 0]]
    case = Decodes(16, 4, 1300)
    case.fill(batches[0])
    case.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            case.attend()
    for seed, lengths in enumerate(batches * 2):
        case.fill(lengths, seed)
        graph.replay()
        assert case.worst_row(lengths) < 8e-3


@pytest.mark.parametrize("general", [pytest.param(False, marks=HOPPER, id="hopper"), pytest.param(True, id="general")])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_model(tmp_path: Path, graphs: bool, general: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepKernels, "_enabled", False)  # no step of generic kernels while others are compiled
    launches: list[None] = []
    attend = hopper_decode.attend_singles
    monkeypatch.setattr(hopper_decode, "attend_singles", lambda *a, **b: launches.append(attend(*a, **b)))
    if general:
        monkeypatch.setattr(hopper_decode, "layer_obstacle", lambda *shape: "not in this test")
    latent = {"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    latent |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8}
    latent |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    reference_model = make_reference(transformers.DeepseekV3Config(**(SIZES | WIDE | latent)))
    save(reference_model, tmp_path)
    loaded = load_tiny(tmp_path, DEVICE, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 3000, (length,), generator=generator).tolist() for length in (5, 300, 41)]
    found = generate(loaded, texts, 8, max_prefill_tokens=70, cuda_graphs=graphs)
    hf = reference_model.to("cuda", torch.bfloat16)
    assert compare_rounded(hf, texts, found.outputs).all_near_ties
    assert bool(launches) != general
