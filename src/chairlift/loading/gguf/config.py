"""GGUF metadata as the `config.json` that Hugging Face would have written for the same model.

What GGUF leaves out because its own runtime hard-codes it (activation, layer pattern, attention scale) is
filled in here, per architecture. RoPE settings use the `rope_theta` / `rope_scaling` spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, corrupt
from chairlift.loading.gguf.metadata import Metadata, token_id
from chairlift.loading.gguf.rope import rope_scaling

Config = dict[str, Any]

# End-of-turn and end-of-document tokens of common formats. Many files declare only one as eos, but a chat model may
# end with either.
_ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})  # gpt-oss ends so; its <|end|> only ends a message.
_CONTROL = 3  # token type
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def hf_config(file: GGUFFile) -> Config:
    everything = Metadata(file)
    architecture = everything.string("general.architecture")
    if architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"{file.path}: the GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(_FAMILIES))}"
        )
    if everything.integer("split.count", 1) != 1:
        raise UnsupportedModel(
            f"{file.path}: is one part of a split GGUF; merge the parts with `llama-gguf-split --merge` first"
        )
    model = everything.below(f"{architecture}.")
    config = _common(model)
    return config | _FAMILIES[architecture](model, config) | _token_ids(everything)


def hf_generation_config(file: GGUFFile) -> Config:
    """The generation config: recommended sampling, bos and eos ids; `eos_token_id` lists every id that ends a text."""
    metadata = Metadata(file)
    tokens = metadata.strings("tokenizer.ggml.tokens") or []
    types = metadata.numbers("tokenizer.ggml.token_type")
    ends = [token_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    if types is not None:
        control = np.flatnonzero(types[: len(tokens)] == _CONTROL)
        special = {tokens[index]: int(index) for index in control}
        is_harmony = special.keys() >= _HARMONY_ENDS
        ends += [special[token] for token in (_ENDS | _HARMONY_ENDS if is_harmony else _ENDS) if token in special]
        ends = [end for end in ends if not (is_harmony and end == special.get("<|end|>"))]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    values = _token_ids(metadata) | {"eos_token_id": eos or None} | _sampling(metadata.below("general.sampling."))
    return {name: value for name, value in values.items() if value is not None}


def _sampling(metadata: Metadata) -> Config:
    """The recommended sampling parameters; floats of 32 bits are rounded to the decimals that were written."""
    values = {name: metadata.value(key) for name, key in _SAMPLING_KEYS.items()}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def _token_ids(metadata: Metadata) -> dict[str, int | None]:
    """Special token ids, None if absent: a missing key would select the family's default id of another vocabulary."""
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: token_id(metadata, kind) for name, kind in ids.items()}


def _common(model: Metadata) -> Config:
    tensors = model.file.tensors
    num_layers = _num_layers(model)
    hidden_size = model.integer("embedding_length")
    num_heads = model.integer("attention.head_count")
    head_dim = model.integer("attention.key_length", max(1, hidden_size // num_heads))
    if model.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{model.file.path}: keys and values of different sizes are not supported")
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    config = {
        "vocab_size": _vocab_size(model),
        "hidden_size": hidden_size,
        "intermediate_size": model.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": model.integer("context_length"),
        "rms_norm_eps": _norm_eps(model),
        "rope_theta": model.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(model, rotary_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def _norm_eps(model: Metadata) -> float:
    """Files of models with layer norms have it under another name."""
    key = "attention.layer_norm_epsilon"
    return model.number(key if model.has(key) else "attention.layer_norm_rms_epsilon")


def _num_layers(model: Metadata) -> int:
    num_layers = model.integer("block_count")
    blocks = {name.split(".")[1] for name in model.file.tensors if name.startswith("blk.")}
    if len(blocks) != num_layers or not all(str(layer) in blocks for layer in range(num_layers)):
        corrupt(model.file.path, f"it claims {num_layers} layers and has tensors of {len(blocks)}")
    return num_layers


def _vocab_size(model: Metadata) -> int:
    embeddings = model.file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        corrupt(model.file.path, "the tensor 'token_embd.weight' is missing or not a matrix")
    num_tokens = len(model.below("tokenizer.ggml.").strings("tokens") or ())
    if num_tokens > embeddings.shape[0]:
        corrupt(model.file.path, f"it has {num_tokens} tokens and embeddings for {embeddings.shape[0]}")
    return embeddings.shape[0]


# Architecture-specific fields


def _llama(model: Metadata, config: Config) -> Config:
    """Llama itself, and Mistral and Mixtral, which share its GGUF architecture."""
    _require_full_rotation(model, config)
    num_experts = model.integer("expert_count", 0, least=0)
    window = model.integer("attention.sliding_window", 0, least=0)
    if num_experts:
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": num_experts,
            "num_experts_per_tok": model.integer("expert_used_count"),
            "sliding_window": window or None,
        }
    if window:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    mlp_bias = "blk.0.ffn_gate.bias" in model.file.tensors
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": mlp_bias}


def _require_full_rotation(model: Metadata, config: Config) -> None:
    if "partial_rotary_factor" in config:
        raise UnsupportedModel(f"{model.file.path}: RoPE over a part of each head is not supported here")


def _smollm3(model: Metadata, config: Config) -> Config:
    _require_full_rotation(model, config)
    interval = 4
    return {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layer_interval": interval,
        # 1: the layer rotates, 0: it does not (the name is Hugging Face's)
        "no_rope_layers": [int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])],
        "use_sliding_window": False,
    }


def _qwen2(model: Metadata, config: Config) -> Config:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(model: Metadata, config: Config) -> Config:
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


def _qwen3_moe(model: Metadata, config: Config) -> Config:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _gpt_oss(model: Metadata, config: Config) -> Config:
    """The scaling of RoPE is not rounded to whole pairs, which files do not say."""
    scaling = config["rope_scaling"]
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": model.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "sliding_window": model.integer("attention.sliding_window"),
        "layer_types": _layer_types([layer % 2 == 0 for layer in range(config["num_hidden_layers"])]),
        "rope_scaling": {"rope_type": "default"} if scaling is None else scaling | {"truncate": False},
    }


def _gemma(model: Metadata, config: Config, full_every: int, widest: int) -> Config:
    """What Gemma 2 and 3 share. The 27B models, of `widest` layers, scale their queries by another width."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    window = model.integer("attention.sliding_window", 0, least=0)
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if num_layers == widest else head_dim,
        "sliding_window": window or None,
        "layer_types": _layer_types([bool(window) and (i + 1) % full_every != 0 for i in range(num_layers)]),
        "attn_logit_softcapping": _softcap(model, "attn_logit_softcapping"),
        "final_logit_softcapping": _softcap(model, "final_logit_softcapping"),
    }


def _gemma2(model: Metadata, config: Config) -> Config:
    shared = _gemma(model, config, full_every=2, widest=46)
    return shared | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


def _gemma3(model: Metadata, config: Config) -> Config:
    pattern = model.integer("attention.sliding_window_pattern", 6)
    return _gemma(model, config, full_every=pattern, widest=62) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": model.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10000.0),
        "sliding_window_pattern": pattern,
    }


def _phi3(model: Metadata, config: Config) -> Config:
    longest = config["max_position_embeddings"]
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": model.integer("rope.scaling.original_context_length", longest),
        "sliding_window": model.integer("attention.sliding_window", 0, least=0) or None,
    }


def _olmo2(model: Metadata, config: Config) -> Config:
    """OLMo 2, or OLMo 3, which shares its GGUF architecture and adds a sliding window."""
    slides = model.numbers("attention.sliding_window_pattern")
    if slides is None:
        return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    if len(slides) != config["num_hidden_layers"]:
        corrupt(model.file.path, "olmo2.attention.sliding_window_pattern must have one entry per layer")
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": model.integer("attention.sliding_window"),
        "layer_types": _layer_types(slides.tolist()),
    }


def _granite(model: Metadata, config: Config) -> Config:
    _require_full_rotation(model, config)
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": model.number("attention.scale"),
        "embedding_multiplier": model.number("embedding_scale"),
        "residual_multiplier": model.number("residual_scale"),
        "logits_scaling": model.number("logit_scale"),
    }


def _glm4(model: Metadata, config: Config) -> Config:
    return {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}


def _cohere(model: Metadata, config: Config) -> Config:
    """Command R, or Command R7B and A, which add a sliding window."""
    shared = {"logit_scale": model.number("logit_scale"), "layer_norm_eps": config["rms_norm_eps"]}
    if not model.has("attention.sliding_window"):
        has_norms = "blk.0.attn_q_norm.weight" in model.file.tensors
        return shared | {"model_type": "cohere", "architectures": ["CohereForCausalLM"], "use_qk_norm": has_norms}
    return shared | {
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": model.integer("attention.sliding_window"),
        "layer_types": _layer_types([(i + 1) % 4 != 0 for i in range(config["num_hidden_layers"])]),
    }


def _exaone4(model: Metadata, config: Config) -> Config:
    window = model.integer("attention.sliding_window", 0, least=0)
    slides = [bool(window) and (i + 1) % 4 != 0 for i in range(config["num_hidden_layers"])]
    return {
        "model_type": "exaone4",
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": window or None,
        "sliding_window_pattern": 4 if window else None,
        "layer_types": _layer_types(slides),
    }


def _seed_oss(model: Metadata, config: Config) -> Config:
    has_bias = "blk.0.attn_output.bias" in model.file.tensors
    return {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "attention_out_bias": has_bias}


def _ernie(model: Metadata, config: Config) -> Config:
    return {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "use_bias": config["attention_bias"]}


def _starcoder2(model: Metadata, config: Config) -> Config:
    return {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config["rms_norm_eps"],
        "use_bias": config["attention_bias"],
        "sliding_window": model.integer("attention.sliding_window", 0, least=0) or None,
    }


def _nemotron(model: Metadata, config: Config) -> Config:
    return {
        "model_type": "nemotron",
        "architectures": ["NemotronForCausalLM"],
        "hidden_act": "relu2",
        "norm_eps": config["rms_norm_eps"],
        "mlp_bias": "blk.0.ffn_up.bias" in model.file.tensors,
    }


def _hunyuan(model: Metadata, config: Config) -> Config:
    return {"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"]}


def _arcee(model: Metadata, config: Config) -> Config:
    _require_full_rotation(model, config)
    return {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}


def _olmoe(model: Metadata, config: Config) -> Config:
    return {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "norm_topk_prob": False,
    }


def _layer_types(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _softcap(model: Metadata, key: str) -> float | None:
    return model.number(key) if model.has(key) else None


_FAMILIES: dict[str, Callable[[Metadata, Config], Config]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "arcee": _arcee,
    "cohere2": _cohere,
    "command-r": _cohere,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "nemotron": _nemotron,
    "seed_oss": _seed_oss,
    "starcoder2": _starcoder2,
}
