"""A draft head as torch trains it: the same numbers as `speculative.head.DraftHead`, over rectangles of whole texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chairlift.attention.base import AttentionLayer
from chairlift.models.decoder import Decoder
from chairlift.speculative.head import unit
from chairlift.speculative.head_config import EPS, HeadConfig


class TrainableHead(nn.Module):
    def __init__(self, config: HeadConfig, target: Decoder) -> None:
        super().__init__()
        layer, hidden = config.layer, config.hidden_size
        assert layer.rope is not None
        self.attention = layer.attention
        queries = layer.attention.num_heads * layer.attention.head_dim
        keys = layer.attention.num_kv_heads * layer.attention.head_dim
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, EPS)
        self.post_attention_layernorm = nn.RMSNorm(hidden, EPS)
        self.norm = nn.RMSNorm(hidden, EPS)
        with torch.no_grad():
            self.norm.weight.copy_(target.norm.weight)  # so that its states begin at the size of the target's
        self.inv_freq = torch.tensor(layer.rope.inv_freq, device=target.device)

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Each [texts, length, hidden]: the tokens' embeddings, and the states of the tokens before -> their states."""
        x = self.mix(torch.cat((unit(embedded), unit(previous)), dim=-1))
        x = x + self.o_proj(self._attend(self.input_layernorm(x)))
        y = self.post_attention_layernorm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        states: Tensor = self.norm(x)
        return states

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.inv_freq
        q, k = (_rotate(heads, angles.cos(), angles.sin()) for heads in (q, k))
        return rectangular_attention(self.attention, q, k, v).transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)
        return heads

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of a checkpoint."""
        where = {"mix": "mix", "norm": "norm"} | {
            name: f"layers.0.{part}{name}"
            for part, names in {
                "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
                "mlp.": ("gate_proj", "up_proj", "down_proj"),
                "": ("input_layernorm", "post_attention_layernorm"),
            }.items()
            for name in names
        }
        return {f"{where[name.split('.')[0]]}.weight": value for name, value in self.state_dict().items()}


class WholeTexts:
    """The attention of a target that reads whole texts of equal length, without a cache."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer.window is not None or layer.softcap is not None:
            raise NotImplementedError("training on models with windowed or capped attention")
        q, k, v = (heads.unflatten(0, (-1, self._length)).transpose(1, 2) for heads in (q, k, v))
        return rectangular_attention(layer, q, k, v).transpose(1, 2).flatten(0, 1)


def rectangular_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each [texts, heads, length, head_dim]."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=layer.scale, enable_gqa=layer.num_heads != layer.num_kv_heads
    )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
