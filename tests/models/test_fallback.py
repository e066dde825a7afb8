"""Models that run with the code of transformers in a ragged batch, and models that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.models import build_model, describe
from chairlift.models.base import HiddenStates
from chairlift.models.fallback import FallbackInfo, TransformersModel, _require_isolated_tokens
from tests.models.checkpoints import CPU, SIZES, VOCAB, assert_matches, load, make_reference, save, stream

transformers = pytest.importorskip("transformers")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"use_parallel_residual": True},
    "gpt2": {},
    "opt": {"ffn_dim": 84, "word_embed_proj_dim": 60},
    "olmo": {},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
}


def config_of(model_type: str) -> Any:
    return transformers.AutoConfig.for_model(model_type, **(SIZES | ARCHITECTURES[model_type]))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    reference = make_reference(config_of(model_type))
    saved = save(reference, tmp_path)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    assert_matches(model, reference, 23, 1, 12)
    info = describe(saved)
    assert info.attention_layers == model.attention_layers
    assert (info.vocab_size, info.max_len, info.hidden_size) == (VOCAB, 128, 60)
    assert info.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert model.num_weight_bytes() == 4 * info.num_parameters


def test_windows_are_read_from_the_mask() -> None:
    config = transformers.AutoConfig.for_model("cwm", **SIZES, head_dim=10, sliding_window=6)
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    layers = describe(config.to_dict()).attention_layers
    assert [layer.window for layer in layers] == [6, None, 6]


def test_weights_are_not_copied(tmp_path: Path) -> None:
    save(make_reference(transformers.AutoConfig.for_model("gpt_neox", **SIZES)), tmp_path)
    tensors = dict(stream(tmp_path))
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    streamed = build_model(describe_config(tmp_path), tensors.items(), dtype=torch.float32, device=CPU)
    assert isinstance(streamed, TransformersModel)
    given = {tensor.data_ptr() for tensor in tensors.values()}
    assert {parameter.data_ptr() for parameter in streamed._backbone.parameters()} <= given


def describe_config(folder: Path) -> dict[str, Any]:
    from tests.models.checkpoints import read_config

    return read_config(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unheard_of": ({}, "transformers has no causal language model of that name"),
    "vit": ({}, "transformers has no causal language model of that name"),
    "bart": ({}, "encoder-decoder"),
    "falcon": ({}, "attention in transformers cannot be replaced"),
    "mamba": ({}, "recurrent state|cannot be replaced"),
    "recurrent_gemma": ({}, "recurrent state"),
    "deepseek_v3": ({"num_hidden_layers": 1}, "heads of one size"),
    "gpt_oss": ({"num_hidden_layers": 1, "num_local_experts": 2}, "s_aux"),
    "diffllama": ({"num_hidden_layers": 1}, "attends twice"),
    "bert": ({"num_hidden_layers": 1}, "neither causal nor"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_the_reason(model_type: str) -> None:
    changes, reason = REFUSED[model_type]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        describe({"model_type": model_type, **changes})
    assert "Llama" in str(caught.value)
    assert repr(model_type) in str(caught.value)


def test_config_without_model_type() -> None:
    with pytest.raises(UnsupportedModel, match="None"):
        describe({})


def test_bad_config_value() -> None:
    with pytest.raises(CorruptCheckpoint, match="hidden_size"):
        describe({"model_type": "gpt_neox", "hidden_size": "wide"})


def test_too_many_layers_are_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="more than 4096 layers"):
        describe({"model_type": "gpt_neox", "num_hidden_layers": 10**7})


def test_dynamic_rope_stays_within_the_trained_length() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 5,
        "long_factor": [2.0] * 5,
        "original_max_position_embeddings": 32,
    }
    config = transformers.AutoConfig.for_model("olmo", **SIZES, rope_parameters=longrope).to_dict()
    assert describe(config).max_len == 32
    assert describe(config, max_len=16).max_len == 16
    with pytest.raises(InvalidParameter, match="max_model_len"):
        describe(config, max_len=33)


def _change(stream: dict[str, Tensor], how: str) -> list[tuple[str, Tensor]]:
    name = "gpt_neox.layers.1.attention.dense.weight"
    if how == "missing":
        del stream[name]
    elif how == "unexpected":
        stream["gpt_neox.layers.1.attention.surprise.weight"] = torch.zeros(2)
    elif how == "fit":
        stream[name] = stream[name][:-1]
    return [*stream.items(), *(stream.items() if how == "more than once" else ())]


@pytest.mark.parametrize("how", ["missing", "unexpected", "fit", "more than once"])
def test_checkpoint_must_fit(how: str, tmp_path: Path) -> None:
    config = save(make_reference(transformers.AutoConfig.for_model("gpt_neox", **SIZES)), tmp_path)
    changed = _change(dict(stream(tmp_path)), how)
    with pytest.raises(CorruptCheckpoint, match=how):
        build_model(config, changed, dtype=torch.float32, device=CPU)


def test_models_that_mix_sequences_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.for_model("olmo", **SIZES)
    saved = save(make_reference(config), tmp_path)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    info = describe(saved)
    assert isinstance(info, FallbackInfo)
    _require_isolated_tokens(model, info)
    clean = model.hidden_states

    def leaking(*args: Any) -> HiddenStates:
        hidden = clean(*args).last
        return HiddenStates(hidden + 0.1 * hidden.cumsum(dim=0))

    monkeypatch.setattr(model, "hidden_states", leaking)
    with pytest.raises(UnsupportedModel, match="influence each other"):
        _require_isolated_tokens(model, info)
