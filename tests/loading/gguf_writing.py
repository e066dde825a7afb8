"""Writes GGUF files as the usual converter does, from tiny Hugging Face checkpoints.

The tensor names come from the gguf package's map, so that our map is compared with another.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[Any]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "arcee": gguf.MODEL_ARCH.ARCEE,
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_gguf(folder: Path, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
    """Write the checkpoint in `folder` as one GGUF file; matrices are quantized, vectors stay float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, config)
    add_rope(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name, tensor in converted(tensors, config).items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        add_tensor(writer, name, tensor, kind if tensor.ndim > 1 else GGMLQuantizationType.F32)
    finish(writer)


def add_tensor(writer: GGUFWriter, name: str, tensor: Array, kind: GGMLQuantizationType) -> None:
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    layer_norm_eps = [config[name] for name in ("layer_norm_eps", "norm_eps", "norm_epsilon") if name in config]
    if layer_norm_eps:
        writer.add_layer_norm_eps(layer_norm_eps[0])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_rope(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if config["model_type"] != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    match rope["rope_type"]:
        case "linear" | "yarn" as kind:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(rope["factor"])
        case "llama3":
            factors = llama3_divisors(rope, rotary_dim)
            add_tensor(writer, "rope_freqs.weight", factors, GGMLQuantizationType.F32)
        case "longrope":
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                add_tensor(writer, f"rope_factors_{length}.weight", factors, GGMLQuantizationType.F32)


def llama3_divisors(rope: dict[str, Any], rotary_dim: int) -> Array:
    """What transformers divides each inverse frequency by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=rotary_dim, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return (plain / scaled).numpy()


def converted(tensors: dict[str, Array], config: dict[str, Any]) -> dict[str, Array]:
    """Convert values to GGUF conventions: interleaved heads, norms plus one, stacked experts."""
    result: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            stacked = f"{match[1]}.{match[3]}"
            if config["model_type"] == "mixtral":  # the package's map has an older name
                stacked = stacked.replace("model.", "").replace("block_sparse_moe", "feed_forward")
            experts.setdefault(stacked, {})[int(match[2])] = tensor
        else:
            result[name] = _converted(name, tensor, config)
    stacks = {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return result | stacks


def _converted(name: str, tensor: Array, config: dict[str, Any]) -> Array:
    if config["model_type"] in ("gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    if config["model_type"] in ("llama", "mistral", "mixtral", "smollm3", "granite", "arcee"):
        if ".q_proj." in name:
            return interleaved(tensor, config["num_attention_heads"])
        if ".k_proj." in name:
            return interleaved(tensor, config["num_key_value_heads"])
    return tensor


def interleaved(tensor: Array, heads: int) -> Array:
    """Row i of each half of a head goes to rows 2i and 2i + 1."""
    per_head = tensor.reshape(heads, -1, *tensor.shape[1:])
    half = per_head.shape[1] // 2
    result = np.empty_like(per_head)
    result[:, 0::2], result[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return result.reshape(tensor.shape)
