"""Invalid checkpoints and configs, and the memory use of loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.models import build_model, describe
from chairlift.models.decoder import Decoder
from chairlift.models.loader import fill, targets
from chairlift.models.read_config import decoder_config
from chairlift.models.wrappers import canonical_name

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def _tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    model = Decoder(decoder_config(config), dtype=torch.float32, device=torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    return {
        ("" if name == "lm_head.weight" else "model.") + name: torch.randn(target.shape, generator=generator)
        for name, target in targets(model)
    }


def _build(config: dict[str, Any], tensors: dict[str, Tensor] | Iterator[tuple[str, Tensor]]) -> Decoder:
    items = tensors.items() if isinstance(tensors, dict) else tensors
    model = build_model(config, items, dtype=torch.float32, device=CPU)
    assert isinstance(model, Decoder)
    return model


def test_missing_tensor_is_named() -> None:
    tensors = _tensors(CONFIG)
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    with pytest.raises(CorruptCheckpoint, match=r"lacks layers\.1\.self_attn\.v_proj\.weight"):
        _build(CONFIG, tensors)


def test_many_missing_tensors_are_summed_up() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"and \d+ more"):
        _build(CONFIG, {})


def test_unexpected_tensor_is_named() -> None:
    tensors = _tensors(CONFIG) | {"model.layers.2.mlp.up_proj.weight": torch.zeros(20, 12)}
    with pytest.raises(CorruptCheckpoint, match=r"unexpected tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        _build(CONFIG, tensors)


def test_image_tensors_are_unexpected_in_a_text_model() -> None:
    tensors = _tensors(CONFIG) | {"vision_tower.patch.weight": torch.zeros(2)}
    with pytest.raises(CorruptCheckpoint, match="vision_tower"):
        _build(CONFIG, tensors)


def test_wrong_shape_names_both() -> None:
    tensors = _tensors(CONFIG)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(12, 21)
    with pytest.raises(CorruptCheckpoint, match=r"down_proj\.weight has shape \[12, 21\].*\[12, 20\]"):
        _build(CONFIG, tensors)


def test_repeated_tensor_is_named() -> None:
    tensors = _tensors(CONFIG)

    def twice() -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()
        yield "model.norm.weight", tensors["model.norm.weight"]

    with pytest.raises(CorruptCheckpoint, match=r"model\.norm\.weight is in the checkpoint more than once"):
        _build(CONFIG, twice())


def test_integer_tensors_are_refused() -> None:
    tensors = _tensors(CONFIG)
    tensors["model.norm.weight"] = torch.ones(12, dtype=torch.int32)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight holds torch\.int32"):
        _build(CONFIG, tensors)


def test_derived_tables_are_skipped() -> None:
    tensors = _tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    _build(CONFIG, tensors)


class TestTiedHead:
    config = CONFIG | {"tie_word_embeddings": True}

    def test_the_head_is_the_embedding(self) -> None:
        tensors = _tensors(self.config)
        assert "lm_head.weight" not in tensors
        hidden = torch.randn(3, 12)
        logits = _build(self.config, tensors).logits(hidden)
        torch.testing.assert_close(logits, hidden @ tensors["model.embed_tokens.weight"].T)

    def test_either_name_is_accepted(self) -> None:
        tensors = _tensors(self.config)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        model = _build(self.config, tensors)
        assert torch.equal(model.embedding.table, tensors["lm_head.weight"])

    def test_both_names_are_accepted_if_equal(self) -> None:
        tensors = _tensors(self.config)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        _build(self.config, tensors)

    def test_a_different_head_contradicts_the_config(self) -> None:
        tensors = _tensors(self.config)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        with pytest.raises(CorruptCheckpoint, match="tie_word_embeddings"):
            _build(self.config, tensors)


def test_prefixes() -> None:
    for prefix in ("", "model.", "language_model.model.", "model.language_model."):
        assert canonical_name(prefix + "layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical_name("language_model.lm_head.weight") == "lm_head.weight"


def test_weights_are_converted_to_the_wanted_type() -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors(CONFIG).items()}
    model = _build(CONFIG, tensors)
    assert model.dtype == model.embedding.table.dtype == torch.float32
    assert model.logits(torch.randn(2, 12).to(torch.float32)).dtype == torch.float32


def test_fill_copies_each_tensor_when_it_arrives() -> None:
    """A tensor of the stream may be invalid once the next one is read."""
    target = {"a": torch.empty(2), "b": torch.empty(2)}
    buffer = torch.empty(2)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, value in (("a", 1.0), ("b", 2.0)):
            yield name, buffer.fill_(value)

    fill(dict(target), stream(), text_part_only=False, tied=False)
    assert target["a"].tolist() == [1.0, 1.0]


def test_weight_bytes() -> None:
    untied, tied = (_build(config, _tensors(config)) for config in (CONFIG, CONFIG | {"tie_word_embeddings": True}))
    assert untied.num_weight_bytes() == 4 * describe(CONFIG).num_parameters
    # Packed for the head and plain for lookups, where packing is possible.
    assert tied.num_weight_bytes() in (untied.num_weight_bytes(), untied.num_weight_bytes() - 4 * 32 * 12)


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": -12}, "hidden_size"),
    ({"hidden_size": "12"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": 13}, "hidden_size.*multiple of num_attention_heads"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"vocab_size": 2**40}, "vocab_size"),
    ({"num_key_value_heads": 2}, "num_attention_heads.*multiple"),
    ({"head_dim": 2**30}, "head_dim"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_parameters": {"full_attention": 7, "sliding_attention": {}}}, "full_attention"),
    ({"rope_scaling": {"type": "yarn", "factor": 1e300, "original_max_position_embeddings": 64}}, "factor"),
    ({"hidden_act": 3}, "hidden_act"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types.*2 entries"),
    ({"model_type": "gemma3", "text_config": 7}, "text_config"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_bad_config_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        describe(CONFIG | changes)


def test_more_weights_than_memory_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"no memory for the .* weights of the model in float32"):
        _build(CONFIG | {"vocab_size": 2**31, "hidden_size": 2**31, "head_dim": 4}, {})


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "swoosh"}, "swoosh.*silu"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
    ({"is_causal": False}, "is_causal"),
    ({"model_type": "gemma2", "layer_types": ["full_attention", "mamba"]}, "mamba"),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED)
def test_unsupported_features_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        describe(CONFIG | changes)
