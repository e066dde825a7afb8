"""Models that run with the code of transformers in a ragged batch, and models that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.models import build_model, describe, format_obstacles
from chairlift.models.base import HiddenStates
from chairlift.models.dummy import dummy_tensors
from chairlift.models.fallback.adapters import with_bias
from chairlift.models.fallback.model import (
    FallbackInfo,
    TransformersModel,
    _require_isolated_tokens,
    can_be_captured,
)
from chairlift.models.fallback.transformers_classes import read_transformers_config
from tests.models.checkpoints import (
    CPU,
    SIZES,
    VOCAB,
    assert_matches,
    load,
    make_reference,
    prompts,
    run_alone,
    save,
    stream,
)
from tests.models.tiny_configs import tiny_config
from tests.tiny import byte_level_tokenizer

transformers = pytest.importorskip("transformers")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"use_parallel_residual": True},
    "gpt2": {},
    "opt": {"ffn_dim": 84, "word_embed_proj_dim": 60},
    "olmo": {},
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


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_as_it_is_published_and_as_transformers_saves_it(prefix: str, tmp_path: Path) -> None:
    """On the hub its tensors have no prefix, and masks are among them; the head is tied."""
    reference = make_reference(transformers.AutoConfig.for_model("gpt2", **SIZES | {"tie_word_embeddings": True}))
    assert save(reference, tmp_path)["architectures"] == ["GPT2LMHeadModel"]
    tensors = {prefix + name.removeprefix("transformer."): tensor for name, tensor in stream(tmp_path)}
    if not prefix:
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
    save_file(tensors, tmp_path / "model.safetensors")
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", kv_memory="4MiB", progress=False)
    prompt, params = [5, 17, 40], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert list(llm.generate(prompt, params)[0].outputs[0].token_ids) == expected[0, 3:].tolist()


LONG: dict[str, Any] = {"short_factor": [1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 5.0], "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "internlm3": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e4},
    "phimoe": LONG | {"rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.4},
    "olmo": LONG | {"rope_type": "longrope", "factor": 4.0},
}


@pytest.mark.parametrize("model_type", ROPES)
def test_ropes_that_depend_on_the_longest_position(model_type: str, tmp_path: Path) -> None:
    ropes = ROPES[model_type] | {"original_max_position_embeddings": 64}
    config = tiny_config(model_type, head_dim=6, hidden_size=24, num_attention_heads=4, rope_parameters=ropes)
    reference = make_reference(config)
    save(reference, tmp_path)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    assert model.max_len == 64
    assert_matches(model, reference, 23, 1, 12)


def test_gemma4_with_experts_runs_on_transformers_code(tmp_path: Path) -> None:
    """Its class slices the mask of layers that share the keys and values of others."""
    config = transformers.Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 5},
        head_dim=16,
        global_head_dim=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=6,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=22,
    )
    reference = make_reference(config)
    save(reference, tmp_path)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    assert_matches(model, reference, 23, 1)


# What the tiny configs leave out: other positions, other heads, heads that are no power of two.
ADAPTED: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True},
    "falcon, one key": {"new_decoder_architecture": False, "multi_query": True},
    "falcon, alibi": {"new_decoder_architecture": False, "multi_query": False, "alibi": True, "num_kv_heads": 4},
    "falcon, alibi and one key": {"new_decoder_architecture": False, "multi_query": True, "alibi": True},
    "bloom": {"n_head": 4},
    "bloom, 12 heads": {"n_head": 12, "hidden_size": 96},
    "mpt": {"n_heads": 4},
    "mpt, 6 heads, clipped": {"n_heads": 6, "hidden_size": 96, "attn_config": {"clip_qkv": 0.4}},
    "gptj": {},
    "codegen": {},
    "gpt_neo": {},
    "gpt_neox_japanese": {},
    "openai-gpt": {},
    "xglm": {},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "minicpm3": {},  # heads of keys and values have different sizes
}


@pytest.mark.parametrize("name", ADAPTED)
def test_own_attention_code_is_adapted(name: str, tmp_path: Path) -> None:
    config = tiny_config(name.split(",")[0], **ADAPTED[name])
    reference = make_reference(config)
    if config.model_type == "falcon" and config.alibi:
        config._attn_implementation = "sdpa"  # the eager attention of transformers adds the bias twice
    save(reference, tmp_path)
    assert_matches(load(tmp_path), reference, 60, 1, 12)


def test_bias_is_carried_without_loss_in_16_bits() -> None:
    """The position of a far key is too large for one number of 16 bits."""
    bias = torch.tensor([[1000.25], [3001.5]])
    q = k = v = torch.zeros(1, 1, 2, 6, dtype=torch.bfloat16)
    wide_q, wide_k, wide_v = with_bias(q, k, v, bias, scale=0.5)
    assert wide_q.shape == wide_k.shape == wide_v.shape == (1, 1, 2, 16)
    scores = 0.5 * (wide_q.float() * wide_k.float()).sum(-1)
    torch.testing.assert_close(scores[0, 0], bias[:, 0], atol=0.02, rtol=0)


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
    assert {parameter.data_ptr() for parameter in streamed._plugged.backbone.parameters()} <= given


def describe_config(folder: Path) -> dict[str, Any]:
    from tests.models.checkpoints import read_config

    return read_config(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unheard_of": ({}, "transformers has no causal language model of that name"),
    "vit": ({}, "transformers has no causal language model of that name"),
    "bart": ({}, "encoder-decoder"),
    "xlnet": ({}, "attention in transformers cannot be replaced"),
    "mamba": ({}, "recurrent state"),
    "recurrent_gemma": ({}, "recurrent state"),
    "minimax": ({"num_hidden_layers": 2}, "recurrent state"),
    "axk2": ({"num_hidden_layers": 1}, "sparse attention"),
    "doge": ({"num_hidden_layers": 1}, "mask from values"),
    "diffllama": ({"num_hidden_layers": 1}, "attends twice"),
    "electra": ({"num_hidden_layers": 1}, "neither causal nor"),
    "dbrx": ({"n_layers": 1, "attn_config": {"clip_qkv": 8, "rope_theta": 5e5}}, "depends on values"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_the_reason(model_type: str) -> None:
    changes, reason = REFUSED[model_type]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        describe({"model_type": model_type, **changes})
    assert "Llama" in str(caught.value)
    assert repr(model_type) in str(caught.value)


@pytest.mark.parametrize("infinite", [float("inf"), {"__float__": "Infinity"}])
def test_infinite_numbers_are_read(infinite: Any) -> None:
    config = read_transformers_config({"model_type": "mamba2", "time_step_limit": [0.0, infinite]})
    assert tuple(config.time_step_limit) == (0.0, float("inf"))


def test_config_without_model_type() -> None:
    with pytest.raises(UnsupportedModel, match="names no model_type"):
        describe({})


def test_bad_config_value() -> None:
    with pytest.raises(CorruptCheckpoint, match="hidden_size"):
        describe({"model_type": "gpt_neox", "hidden_size": "wide"})


def test_too_many_layers_are_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="more than 4096 layers"):
        describe({"model_type": "gpt_neox", "num_hidden_layers": 10**7})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_biases_of_keys_survive_a_cache_in_16_bits(dtype: torch.dtype) -> None:
    bias, scale = torch.arange(1990, 2000)[:, None] * torch.tensor([0.707, 0.01]), 0.25
    q, k, v = torch.zeros(3, 1, 2, 10, 8, dtype=dtype)
    q, k, v = with_bias(q, k, v, bias, scale)
    scores = q.float() @ k.bfloat16().float().mT * scale
    torch.testing.assert_close(scores[0, :, 0], bias.T, rtol=2**-15, atol=0)


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


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "falcon", "bloom"])
def test_int8_stays_close(model_type: str, tmp_path: Path) -> None:
    """Linear maps, also those of GPT-2 with the weight transposed and a tied head, in 8 bits."""
    reference = make_reference(tiny_config(model_type, hidden_size=128))
    config = save(reference, tmp_path)
    assert not format_obstacles(config, "int8", torch.float32, CPU)
    model, plain = load(tmp_path, quantization="int8"), load(tmp_path)
    assert (model.quantization, model.kv_dtype) == ("int8", torch.bfloat16)
    assert model.num_weight_bytes() < (0.6 if reference.config.tie_word_embeddings else 0.45) * plain.num_weight_bytes()
    tokens = prompts(30)[0]
    exact, rounded = run_alone(plain, tokens), run_alone(model, tokens)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_has_threads_of_its_own_in_float32(dtype: torch.dtype) -> None:
    """In bfloat16 its products run on those of torch, which then must not be reduced."""
    config = tiny_config("gpt2").to_dict()
    model = build_model(config, dummy_tensors(config, CPU), dtype=dtype, device=CPU, quantization="int4")
    assert model.has_own_threads == (dtype is torch.float32)


def test_formats_that_are_not_possible_are_refused() -> None:
    dense, experts = (tiny_config(model_type).to_dict() for model_type in ("gpt_neox", "aria_text"))
    assert format_obstacles(dense, "fp8", torch.bfloat16, torch.device("cuda"))[0].startswith("this model runs on")
    assert format_obstacles(dense, "checkpoint", torch.float32, CPU)[0].startswith("this model runs on")
    assert format_obstacles(dense, "int8", torch.bfloat16, CPU) == [
        "activations are float32 with it, not torch.bfloat16"
    ]
    assert format_obstacles(experts, "int8", torch.float32, CPU) == ["this model has experts"]
    with pytest.raises(InvalidParameter, match="this model has experts"):
        build_model(experts, [], dtype=torch.float32, device=CPU, quantization="int8")


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "opt"])
def test_dummy_weights_fit(model_type: str) -> None:
    config = tiny_config(model_type).to_dict()
    model = build_model(config, dummy_tensors(config, CPU), dtype=torch.float32, device=CPU)
    assert model.num_weight_bytes() == 4 * describe(config).num_parameters


@pytest.mark.parametrize("waits", [False, True])
def test_capturing_is_tried(waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch raises if a forward pass waits for the device while it is captured means that there are no graphs."""

    @contextmanager
    def graph(captured: object) -> Iterator[None]:
        yield
        if waits:
            raise RuntimeError("operation not permitted when stream is capturing")

    save(make_reference(tiny_config("gpt_neox")), tmp_path)
    model = load(tmp_path)
    assert isinstance(model, TransformersModel)
    for name, stand_in in {"graph": graph, "CUDAGraph": object, "current_stream": object}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    assert can_be_captured(model) is not waits
