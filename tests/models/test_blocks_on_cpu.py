"""Models in blocks of GGUF files on a CPU: as stored, next to their dequantized weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from chairlift import LLM, SamplingParams
from chairlift.attention.batch import StepBatch
from chairlift.config import EngineConfig
from chairlift.engine import settings
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter
from chairlift.layers.embedding import StoredEmbedding
from chairlift.layers.expert_weights import BlockExperts
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.models import build_model
from chairlift.models.programs.fuse_cpu import FusedCPUProgram
from tests.loading.gguf_writing import write_gguf
from tests.loading.tiny_models import save_model
from tests.models.dense_attend import DenseCache
from tests.models.random_gguf import random_gguf
from tests.runner.gpu_speculation import write_random_head

PROMPTS = [[7, 300, 21, 9], list(range(40, 110)), [5] * 33]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    "format", ["q4_k_m", "iq4_xs", *(pytest.param(each, marks=pytest.mark.slow) for each in ("q4_1", "q5_k_m"))]
)
def test_logits_are_near_those_of_the_dequantized_weights(format: str, tmp_path: Path) -> None:
    path = random_gguf(tmp_path, format, tie_word_embeddings=format == "q4_1")
    stored = LLM(str(path), quantization="checkpoint", kv_dtype="bfloat16", max_model_len=256)
    exact = LLM(str(path), quantization="none", dtype="float32", kv_dtype="bfloat16", max_model_len=256)
    scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    sides = [llm.generate(PROMPTS, scoring) for llm in (stored, exact)]
    for ours, reference in zip(*sides, strict=True):
        found, expected = (
            torch.tensor([next(iter(each.values())).logprob for each in side.prompt_logprobs[1:]])
            for side in (ours, reference)
        )
        difference = (found - expected).abs()  # logits have a standard deviation of about one
        assert difference.mean() < 0.03
        assert difference.max() < 0.15


def test_weights_stay_in_blocks_and_run_fused(tmp_path: Path) -> None:
    path = random_gguf(tmp_path, "q4_k_m")
    model: Any = load_model(str(path), EngineConfig(quantization="checkpoint"), progress=False).model
    assert isinstance(model.embedding, StoredEmbedding)
    assert isinstance(model.program, FusedCPUProgram)
    assert model.program.has_own_threads
    kinds = {kind for layer in model.layers for linear in layer.linears() for kind in linear.weight.kinds}
    assert kinds == {"Q4_K", "Q6_K"}
    assert isinstance(model.head.weight, BlockWeight)
    assert model.num_weight_bytes() < 1.06 * path.stat().st_size


def test_a_file_on_other_code_is_rounded_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(settings, "MIN_INT8_PARAMETERS", 0)
    monkeypatch.setattr(settings, "MIN_BLOCK_PARAMETERS", 0)
    path = str(random_gguf(tmp_path, "q4_0", num_hidden_layers=1))
    formats = {
        code: load_model(path, EngineConfig(device="cpu", model_impl=code), progress=False).model.quantization
        for code in ("native", "transformers")
    }
    assert formats == {"native": "checkpoint", "transformers": "int8"}


def test_a_table_that_is_not_in_blocks_is_looked_up(tmp_path: Path) -> None:
    """Blocks are multiplied with float32 activations only; in bfloat16, 4-bit weights have another format."""
    path = str(random_gguf(tmp_path, "q4_0", tie_word_embeddings=True, num_hidden_layers=1))
    found = []
    for quantization in ("checkpoint", "none"):
        config = EngineConfig(device="cpu", dtype="bfloat16", quantization=quantization)
        model: Any = load_model(path, config, progress=False).model
        found.append(model.embed(torch.tensor([3, 49_151])))
    torch.testing.assert_close(*found)


def test_a_draft_head_works_beside_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    path = str(random_gguf(tmp_path, "q4_0", **sizes, num_hidden_layers=2, tie_word_embeddings=True))
    options: dict[str, Any] = {"quantization": "checkpoint", "max_model_len": 256, "progress": False}
    model: Any = load_model(path, EngineConfig(quantization="checkpoint"), progress=False).model
    drafting = LLM(path, speculate=f"draft:{write_random_head(tmp_path, model)}", **options)
    assert tokens(drafting, PROMPTS) == tokens(LLM(path, **options), PROMPTS)


def test_shapes_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    missing = dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"))
    path = random_gguf(tmp_path, "q8_0", **missing, rope_parameters={"rope_theta": 5e5}, num_hidden_layers=1)
    config = open_checkpoint(path).config
    assert (config["num_key_value_heads"], config["rope_theta"]) == (4, 5e5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"vocab_size": 32_000}, "must not be below the 49152 tokens"), ({"hidden_size": None}, "lacks")],
)
def test_shapes_that_cannot_be_files_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        random_gguf(tmp_path, "q4_0", **changes)
    assert not list(tmp_path.iterdir())


def test_tokens_do_not_depend_on_batches_and_chunks(tmp_path: Path) -> None:
    path, options = str(random_gguf(tmp_path, "q4_0")), {"quantization": "checkpoint", "batch_invariant": True}
    llm = LLM(path, max_model_len=256, prefix_caching=False, **options)
    alone = [tokens(llm, [prompt])[0] for prompt in PROMPTS]
    assert tokens(llm, PROMPTS) == alone
    for chunk in (1, 7, 64):
        chunked = LLM(path, max_model_len=256, max_prefill_tokens=chunk, **options)
        assert tokens(chunked, PROMPTS) == alone
        assert tokens(chunked, PROMPTS) == alone  # with prefixes from the cache


def test_experts_are_computed_in_blocks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_model("qwen3 moe", tmp_path / "hf", moe_intermediate_size=64)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    tokens = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(1))
    found = []
    for quantization in ("checkpoint", "none"):
        model: Any = build_model(
            checkpoint.config,
            checkpoint.stored(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            quantization=quantization,
        )
        with torch.inference_mode():
            attend = DenseCache().step([("a", 40)])
            found.append(model.logits(model.hidden_states(StepBatch(tokens, torch.arange(40)), attend).last))
        mixtures = [layer.mlp for layer in model.layers]
        in_blocks = [isinstance(each.down, BlockExperts) and each.down.in_blocks for each in mixtures]
        assert in_blocks == [quantization == "checkpoint"] * len(mixtures)
        assert model.has_own_threads == (quantization == "checkpoint")
    assert found[1].std() > 0.05
    assert (found[0] - found[1]).abs().mean() < 0.04 * found[1].std()  # another expert would change it by its size
