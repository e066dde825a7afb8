"""Maps GGUF tensors to Hugging Face tensors, and undoes what the GGUF converter changed.

The converter that writes GGUF files changes three things besides the names:
- `llama` and those derived from it: the rows of each head of q and k are reordered, since that runtime rotates
  neighbours (0, 1), (2, 3), ... where Hugging Face rotates halves (0, d/2), (1, d/2 + 1), ...
- Gemma and Nemotron: norm weights are stored as 1 + w, Hugging Face stores w;
- mixtures of experts: the experts' matrices are stacked into one tensor [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import UnsupportedModel
from chairlift.loading.gguf.file import GGUFFile, GGUFTensor, corrupt


@dataclass(frozen=True, slots=True)
class Source:
    """Where a Hugging Face tensor comes from."""

    tensor: GGUFTensor
    expert: int | None = None  # only this slice of a stacked tensor
    interleaved_heads: int = 0  # > 0: undo the interleaving of rows for this number of heads
    offset: float = 0.0  # subtracted from the values

    def read(self, file: GGUFFile) -> NDArray[np.float32]:
        values = file.read(self.tensor, self.expert)
        if self.offset:
            values -= self.offset
        return np.ascontiguousarray(values[self.row_order(len(values))]) if self.interleaved_heads else values

    def row_order(self, rows: int) -> NDArray[np.int64]:
        """The stored row of each row."""
        order = np.arange(rows)
        if self.interleaved_heads:
            order = order.reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).reshape(rows)
        return order


def sources(file: GGUFFile, config: dict[str, Any]) -> dict[str, Source]:
    """Every Hugging Face tensor of the model and its source, in file order."""
    by_name: dict[str, Source] = {}
    for tensor in file.tensors.values():
        if tensor.name not in _FOR_THE_CONFIG:
            by_name.update(_sources_of(tensor, file, config))
    return by_name


_FOR_THE_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_OUTSIDE_THE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = (
    _ATTENTION
    | _MLP
    | _NORMS_AFTER
    | {
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
    }
)

_LLAMA = _ATTENTION | _MLP | _NORMS_BEFORE
_OLMO = _ATTENTION | _MLP | _QK_NORMS | _NORMS_AFTER

# The tensors of one layer, by Hugging Face's model_type.
_LAYER = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _ATTENTION | _NORMS_BEFORE | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "smollm3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _QK_NORMS,
    "qwen3_moe": _ATTENTION | _QK_NORMS | _NORMS_BEFORE | {"ffn_gate_inp": "mlp.gate"},
    "gpt_oss": _ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | _QK_NORMS,
    "phi3": {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
    | _NORMS_BEFORE,
    "arcee": _LLAMA,
    "cohere": _LLAMA | _QK_NORMS,
    "cohere2": _LLAMA,
    "ernie4_5": _LLAMA,
    "exaone4": _OLMO,
    "glm4": _ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "granite": _LLAMA,
    "hunyuan_v1_dense": _LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "nemotron": _LLAMA,
    "olmoe": _ATTENTION | _QK_NORMS | _NORMS_BEFORE | {"ffn_gate_inp": "mlp.gate"},
    "seed_oss": _ATTENTION | _MLP | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "starcoder2": _ATTENTION | _NORMS_BEFORE | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
}

_SINKS = {"attn_sinks": "self_attn.sinks"}  # the whole name: Hugging Face's has no suffix

_MLP_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
}
_EXPERTS = {
    "mixtral": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "olmoe": _MLP_EXPERTS,
    "qwen3_moe": _MLP_EXPERTS,
    "gpt_oss": _MLP_EXPERTS,
}

_INTERLEAVED = frozenset({"llama", "mistral", "mixtral", "smollm3", "granite", "arcee"})
_NORMS_PLUS_ONE = frozenset({"gemma2", "gemma3_text", "nemotron"})


def _sources_of(tensor: GGUFTensor, file: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Source]]:
    model_type = config["model_type"]
    is_norm = tensor.name.endswith("_norm.weight")
    offset = 1.0 if is_norm and model_type in _NORMS_PLUS_ONE else 0.0
    if tensor.name in _OUTSIDE_THE_LAYERS:
        yield _OUTSIDE_THE_LAYERS[tensor.name], Source(tensor, offset=offset)
        return
    block, layer, kind, suffix = _split(tensor.name)
    if block == "blk" and suffix in ("weight", "bias") and kind in _EXPERTS.get(model_type, {}):
        num_experts = config.get("num_local_experts") or config["num_experts"]
        if len(tensor.shape) != (3 if suffix == "weight" else 2) or tensor.shape[0] != num_experts:
            corrupt(file.path, f"{tensor.name!r} has the shape {tensor.shape} for {num_experts} experts")
        for expert in range(num_experts):
            name = _EXPERTS[model_type][kind].format(expert)
            yield f"model.layers.{layer}.{name}.{suffix}", Source(tensor, expert=expert)
        return
    if block == "blk" and model_type == "gpt_oss" and kind in _SINKS:
        yield f"model.layers.{layer}.{_SINKS[kind]}", Source(tensor)
        return
    if block != "blk" or suffix not in ("weight", "bias") or kind not in _LAYER[model_type]:
        raise UnsupportedModel(f"{file.path}: the tensor {tensor.name!r} is not known for {model_type} models")
    heads = _interleaved_heads(tensor, kind, file, config) if model_type in _INTERLEAVED else 0
    name = f"model.layers.{layer}.{_LAYER[model_type][kind]}.{suffix}"
    yield name, Source(tensor, interleaved_heads=heads, offset=offset)


def _split(name: str) -> tuple[str, str, str, str]:
    """blk.<layer>.<kind>.<suffix>"""
    parts = name.split(".")
    return (parts[0], parts[1], parts[2], parts[3]) if len(parts) == 4 else ("", "", "", "")


def _interleaved_heads(tensor: GGUFTensor, kind: str, file: GGUFFile, config: dict[str, Any]) -> int:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if kind not in heads:
        return 0
    count = int(config[heads[kind]])
    if tensor.shape[0] != count * config["head_dim"] or config["head_dim"] % 2:
        corrupt(file.path, f"{tensor.name!r} has the shape {tensor.shape} for {count} heads of {config['head_dim']}")
    return count
