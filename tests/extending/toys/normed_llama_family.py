"""A model family: Llama with an activation of its own, norms of query and key heads, and a third norm in each layer."""

import torch
from torch import Tensor

from chairlift.layers.mlp import ACTIVATIONS
from chairlift.models.config import NormNames
from chairlift.models.families import FAMILIES, Family


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS["quick_gelu"] = quick_gelu
FAMILIES["normed_llama"] = Family(
    title="Normed Llama",
    defaults={"max_position_embeddings": 256, "act": "quick_gelu"},
    qk_norm="head",
    activation_key="act",
    norms=NormNames(
        before_attention="input_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
)
