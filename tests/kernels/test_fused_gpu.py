"""Programs of GPU kernels compute what the plain layers compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import PagedLayout, StepBatch, build_batch
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.triton.int4.matrix import dequantized
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.int4 import Int4Weight
from chairlift.layers.formats.none import PlainWeight
from chairlift.models import build_model
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.models.loader import DecoderLoader
from chairlift.models.programs.fuse_gpu import GPUProgram, can_fuse
from chairlift.runner.memory import allocate_storage
from tests.kernels.tiny_config import CONFIG

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},  # biases of queries, keys and values
    "llama": {  # biases of all four products of attention
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "attention_bias": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
    },
    "gpt_oss": {  # biases everywhere, sinks, a clamped gate
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}


def tensors(changes: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for name, tensor in dummy_tensors(CONFIG | changes, device):
        yield name, torch.randn_like(tensor.float()) * 0.3


def make_model(changes: dict[str, Any], device: torch.device) -> Decoder:
    model = build_model(CONFIG | changes, tensors(changes, device), dtype=torch.float16, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder, storage: KVStorage, rows: list[tuple[int, int]]) -> torch.Tensor:
    """One new token for each (position, first block of the table), in one step."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    count = len(rows)
    none = torch.empty(0, dtype=torch.int32)
    positions = ints([position for position, _ in rows])
    layout = PagedLayout(
        slots=ints(list(range(count))),
        positions=positions,
        tables=ints([block + i for _, block in rows for i in range(3)]).view(count, 3),
        chunk_slot=ints(list(range(count))),
        chunk_row=ints(list(range(count))),
        chunk_start=positions,
        chunk_count=ints([1] * count),
        num_single=count,
        tile_chunk=none,
        tile_offset=none,
        tile_queries=16,
        one_per_request=True,
    )
    batch = StepBatch(ints(list(range(1, count + 1))), positions, paged=layout)
    return model.logits(model.hidden_states(batch, PagedGPUAttention().begin(batch, storage)).last)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_equal_plain_layers(family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
    model = make_model(FAMILIES[family], device)
    storage = allocate_storage(model.attention_layers, 12, 8, torch.float16, torch.device("cpu"))
    torch.manual_seed(1)
    for side in (*storage.keys, *storage.values):
        side.copy_(torch.randn_like(side.float()))
    kept = [side.clone() for side in (*storage.keys, *storage.values)]
    rows = [(0, 0), (17, 3), (8, 6)]
    with torch.inference_mode():
        expected = logits(model, storage, rows)
        written = [side.clone() for side in (*storage.keys, *storage.values)]
        for side, before in zip((*storage.keys, *storage.values), kept, strict=True):
            side.copy_(before)
        model.program = GPUProgram(model.program.parts, has_all_kernels=True)
        for layer in model.layers:
            model.program.before_packing(layer)
        model.program.finalize()
        found = logits(model, storage, rows)
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 5e-3
    for side, before in zip((*storage.keys, *storage.values), written, strict=True):
        assert float((side.float() - before.float()).abs().max()) < 0.05


def make_rounded_model(changes: dict[str, Any], exact: Decoder) -> Decoder:
    """The same model with fused layers and 8-bit weights; `exact` gets the weights as they were rounded."""
    model = Decoder(exact.config, dtype=torch.float16, device=torch.device("cpu"), format=FP8Weight)
    model.program = GPUProgram(model.program.parts, has_all_kernels=True)
    DecoderLoader(model).load(tensors(changes, torch.device("cpu")))
    for mine, theirs in zip(model.layers, exact.layers, strict=True):
        for norm in (theirs.before_attention, theirs.before_mlp):
            assert norm is not None
            norm.weight.fill_(1.0)
        for rounded, plain in zip(mine.linears(), theirs.linears(), strict=True):
            assert isinstance(rounded.weight, FP8Weight)
            assert plain.weight.plain is not None
            plain.weight.plain.copy_(rounded.weight.dequantized())
    return model


@pytest.mark.parametrize(("few_rows", "limit"), [(64, 5e-3), (1, 0.15)], ids=["widened", "rounded"])
def test_fused_layers_with_8_bit_weights(
    few_rows: int, limit: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are exact but for the weights; more rows are rounded, too."""
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
    fuses = dict(FP8Weight.traits.fuses, norm=few_rows)
    monkeypatch.setattr(FP8Weight, "traits", replace(FP8Weight.traits, fuses=fuses))
    exact = make_model(FAMILIES["llama"], device)
    model = make_rounded_model(FAMILIES["llama"], exact)
    rows = [(0, 0), (17, 3), (8, 6)]
    found = []
    with torch.inference_mode():
        for one in (model, exact):
            storage = allocate_storage(model.attention_layers, 12, 8, torch.float16, torch.device("cpu"))
            torch.manual_seed(1)
            for side in (*storage.keys, *storage.values):
                side.copy_(torch.randn_like(side.float()))
            found.append(logits(one, storage, rows))
    difference = float(((found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)).max())
    assert difference < limit
    assert few_rows > 1 or difference > 5e-3, "the activations were not rounded"


def test_only_supported_layers_are_fused() -> None:
    config = make_model({}, torch.device("cpu")).config
    cuda = torch.device("cuda")
    assert can_fuse(config, torch.bfloat16, cuda)
    assert not can_fuse(config, torch.float32, cuda)
    assert not can_fuse(config, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("plain", [False, True], ids=["all maps", "but one"])
def test_fused_layers_with_4_bit_weights(plain: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are not part of the weights; a map that is not rounded runs in the same stream."""
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
    shape = FAMILIES["qwen2"] | {"intermediate_size": 64, "num_hidden_layers": 2}
    exact = make_model(shape, device)
    model = Decoder(exact.config, dtype=torch.float16, device=torch.device("cpu"), format=Int4Weight)
    model.program = GPUProgram(model.program.parts, has_all_kernels=True)
    loader = DecoderLoader(model)
    loader.fill(tensors(shape, torch.device("cpu")))
    for mine, theirs in zip(model.layers, exact.layers, strict=True):
        for rounded, each in zip(mine.linears(), theirs.linears(), strict=True):
            assert isinstance(rounded.weight, Int4Weight)
            assert rounded.weight.matrix is not None
            assert each.weight.plain is not None
            each.weight.plain.copy_(dequantized(rounded.weight.matrix))
        if plain:
            mine.attention.output.weight = PlainWeight(theirs.attention.output.weight.plain)
    loader.finalize()
    rows = [(0, 0), (17, 3), (8, 6)]
    found = []
    with torch.inference_mode():
        for one in (model, exact):
            storage = allocate_storage(model.attention_layers, 12, 8, torch.float16, torch.device("cpu"))
            torch.manual_seed(1)
            for side in (*storage.keys, *storage.values):
                side.copy_(torch.randn_like(side.float()))
            found.append(logits(one, storage, rows))
    assert float(((found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)).max()) < 5e-3


def hidden_rows(model: Decoder, storage: KVStorage, chunks: list[tuple[list[int], int, list[int]]]) -> list[Tensor]:
    """The hidden states of one step of chunks (all tokens of a request, where the chunk starts, blocks), of each."""
    planned = []
    for index, (tokens, start, table) in enumerate(chunks):
        request = Request(f"{index}", tokens, SamplingParams(), max_new_tokens=1, arrival=0.0)
        planned.append(Chunk(request, start, len(tokens) - start, table, samples=False))
    batch = build_batch(StepPlan(0, tuple(planned)), storage, torch.device("cpu"))
    attend = PagedGPUAttention(invariant_for=128).begin(batch, storage)
    found = model.hidden_states(batch, attend).last
    return list(found.split([chunk.count for chunk in planned]))


def test_invariant_fused_layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's hidden state is the same, bit for bit, in a prompt, in chunks, token by token and beside others."""
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.SHORTEST_SPAN", 64)
    monkeypatch.setattr("chairlift.kernels.triton.invariant_attention.PROGRAMS", 4)
    shape = FAMILIES["qwen2"] | {"num_hidden_layers": 2}
    options: dict[str, Any] = {"dtype": torch.float16, "device": torch.device("cpu"), "batch_invariant": True}
    model = build_model(CONFIG | shape, tensors(shape, device), **options)
    assert isinstance(model, Decoder)
    model.program = GPUProgram(model.program.parts, has_all_kernels=True)
    for layer in model.layers:
        model.program.before_packing(layer)
    model.program.finalize()
    storage = allocate_storage(model.attention_layers, 15, 8, torch.float16, torch.device("cpu"))
    first = [3 + 7 * i % 250 for i in range(90)]  # two spans
    second = [5 + 11 * i % 250 for i in range(21)]
    mine, theirs = list(range(12)), list(range(12, 15))
    with torch.inference_mode():
        (whole,) = hidden_rows(model, storage, [(first, 0, mine)])
        (other,) = hidden_rows(model, storage, [(second, 0, theirs)])
        again = [hidden_rows(model, storage, [(first[:13], 0, mine)])[0]]
        again += hidden_rows(model, storage, [(first[:82], 13, mine)])
        for end in range(83, 91):  # single tokens beside another request's chunk or token
            start = 0 if end % 2 else 20
            beside = [(second[:21], start, theirs), (first[:end], end - 1, mine)]
            order = sorted(beside, key=lambda chunk: len(chunk[0]) - chunk[1])  # single tokens come first
            found = dict(zip([chunk[2][0] for chunk in order], hidden_rows(model, storage, order), strict=True))
            again.append(found[mine[0]])
            assert found[theirs[0]].equal(other[start:])
    assert torch.cat(again).equal(whole)
