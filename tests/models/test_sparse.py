"""Sparse attention, in which an index chooses positions: DeepSeek V3.2 and GLM-5 against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention.backends.base import choose_backend
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer
from chairlift.attention.storage import KVStorage
from chairlift.config import EngineConfig
from chairlift.engine.startup import load_model
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.models import describe
from chairlift.runner.memory import allocate_storage
from tests.models.checkpoints import SIZES, make_reference, read_config, save
from tests.models.greedy_everywhere import assert_greedy_everywhere, generate, greedy
from tests.tiny import byte_level_tokenizer

transformers = pytest.importorskip("transformers")

CHOSEN = 7
LATENT: dict[str, Any] = SIZES | {
    "vocab_size": 320,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 22,
    "num_experts_per_tok": 3,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": CHOSEN,
    "index_head_dim": 12,
    "index_n_heads": 16,  # With few heads, scores are often zero in all of them, and ties have no order.
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepseekV32Config": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "rope_theta": 1e4,
        }
    },
    "GlmMoeDsaConfig": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
}
PROMPTS = [[5, 17, 40, 211, 90], [3 + 7 * i % 290 for i in range(43)], [3 + 7 * i % 290 for i in range(30)]]
CPU = torch.device("cpu")


def _write(folder: Path, name: str, changes: dict[str, Any]) -> Any:
    reference = make_reference(getattr(transformers, name)(**(LATENT | changes)))
    save(reference, folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return reference


@pytest.mark.parametrize("name", [pytest.param("DeepseekV32Config", marks=pytest.mark.slow), "GlmMoeDsaConfig"])
def test_greedy_tokens_everywhere(name: str, tmp_path: Path) -> None:
    reference = _write(tmp_path, name, CONFIGS[name])
    assert_greedy_everywhere(tmp_path, reference, PROMPTS)


def test_greedy_tokens_of_halves_and_yarn(tmp_path: Path) -> None:
    """DeepSeek's rotation differs from GLM's."""
    reference = _write(tmp_path, "DeepseekV32Config", CONFIGS["DeepseekV32Config"])
    loaded = load_model(str(tmp_path), EngineConfig(device="cpu", dtype="float32"), progress=False)
    assert generate(loaded, PROMPTS[1:], max_prefill_tokens=13)[0] == [greedy(reference, each) for each in PROMPTS[1:]]


def test_decode_reads_a_quarter_of_the_bytes_at_16k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index keys of all positions and chosen latents, against the latents of all positions; the same sums as by the
    formula with a mask."""
    length, size = 16_384, 16
    layer = AttentionLayer(0, 4, 1, 576, 0.1, latent_dim=512)
    index = AttentionLayer(1, 8, 1, 64, 1.0, latent_dim=64, chooses=1024)
    storage = allocate_storage([layer, index], length // size, size, torch.float32, CPU)
    for side in storage.tensors:
        side.normal_()
    table = torch.randperm(length // size)[None].int()
    last = int(table[0, -1]) * size + size - 1
    layout = RaggedLayout([0, 1], [length - 1], [length], table, torch.tensor([last]))
    batch = StepBatch(torch.zeros(1).long(), torch.tensor([length - 1]), ragged=layout)
    read = 0

    def counting(method: Any) -> Any:
        def counted(*args: Any) -> Any:
            nonlocal read
            result = method(*args)
            read += (result[0] if isinstance(result, tuple) else result).nbytes
            return result

        return counted

    for name in ("read", "select"):
        monkeypatch.setattr(KVStorage, name, counting(getattr(KVStorage, name)))
    keys, weights, latent = torch.randn(1, 1, 64), torch.randn(1, 8), torch.randn(1, 1, 576)
    queries, index_queries = torch.randn(1, 4, 576), torch.randn(1, 8, 64)
    sums = {}
    for name in ("ragged", "bursted"):
        step = choose_backend(name, [layer, index], CPU, torch.float32).begin(batch, storage)
        chosen = step.choose(index, index_queries, keys, weights)
        assert chosen is not None
        assert len(set(chosen[0].tolist())) == 1024
        sums[name] = step.attend_to_chosen(layer, queries, latent, chosen)
        if name == "ragged":
            assert 0 < read <= length * 576 * 4 / 4
    torch.testing.assert_close(sums["ragged"], sums["bursted"], rtol=1e-4, atol=1e-5)


def test_short_sequences_need_no_index(tmp_path: Path) -> None:
    """If no sequence can be longer than what is chosen, no index is loaded, and every device can run it."""
    reference = _write(tmp_path, "GlmMoeDsaConfig", {"index_topk": 48})
    settings = EngineConfig(device="cpu", dtype="float32", max_model_len=48)
    loaded = load_model(str(tmp_path), settings, progress=False)
    assert [layer.chooses for layer in loaded.model.attention_layers] == [None] * 3
    assert generate(loaded, [PROMPTS[2]], max_model_len=48)[0] == [greedy(reference, PROMPTS[2])]
    layers = describe(read_config(tmp_path)).attention_layers
    assert [layer.chooses for layer in layers] == [None] * 3 + [48] * 3
    assert [layer.index for layer in layers] == list(range(6))
    with pytest.raises(InvalidParameter, match="--max-model-len 48 needs no index"):
        choose_backend("ragged", layers, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "the first full"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, "must be full or shared"),
        ({"index_head_dim": 4}, "room for the 8 of rotation"),
        ({"index_topk": 0}, "index_topk"),
        ({"model_type": "deepseek_v3"}, "this family does not have"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    config = transformers.GlmMoeDsaConfig(**LATENT).to_dict() | {"model_type": "glm_moe_dsa"} | changes
    with pytest.raises((CorruptCheckpoint, UnsupportedModel), match=message):
        describe(config)


def test_layers_that_share_a_choice() -> None:
    """By a list, by a pattern, and by how many layers share one from which on, as transformers reads them."""
    own = LATENT | {"num_hidden_layers": 8}
    for how in ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, {"index_topk_pattern": "FFSSFSFS"}, {}):
        known = transformers.GlmMoeDsaConfig(**own, **how)
        config = {key: value for key, value in known.to_dict().items() if key != "indexer_types"} | how
        count = sum(layer.chooses is not None for layer in describe(config).attention_layers)
        assert count == known.indexer_types.count("full")
