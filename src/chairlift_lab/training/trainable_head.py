"""A draft head as a torch module: computes the same as `HeadNetwork` of speculation/draft_models.py, on whole texts.

In use, the second draft token is computed from the head's state at the first: the head attends to keys from the
target's states, and then to keys from its own. It is trained in the same way, at all positions of a text at once.
Depth 0 is computed from the target's states, depth 1 from the head's states of depth 0, and so on:

    position        t-3   t-2   t-1    t
    depth 0          x     x     .     .      visible from t at depth 2: depth 0 up to position t-2,
    depth 1          .     .     x     .      the position before in depth 1,
    depth 2          .     .     .     x      and itself
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.models.decoder import Decoder
from chairlift.speculation.head_layers import EPS, HeadConfig, unit
from chairlift_lab.training.texts import refuse_unusual_attention

INITIAL_NORM_SCALE = 0.3
KeysValues = list[tuple[Tensor, Tensor]]  # keys and values of each depth [texts, heads, length, head_dim]


class TrainableHead(nn.Module):
    def __init__(self, config: HeadConfig, target: Decoder) -> None:
        super().__init__()
        layer, hidden = config.layer, config.hidden_size
        assert layer.rope is not None
        self.attention = layer.only_attention
        queries = self.attention.num_heads * self.attention.head_dim
        keys = self.attention.num_kv_heads * self.attention.head_dim
        self.joint = nn.Linear(config.feature_size, hidden, bias=False) if config.taps else nn.Identity()
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.input_layernorm = _Norm(hidden, EPS)
        self.post_attention_layernorm = _Norm(hidden, EPS)
        self.norm = _Norm(hidden, EPS)
        with torch.no_grad():
            # States end up as large as the target's; smaller ones at first avoid confident wrong drafts.
            self.norm.weight.copy_(INITIAL_NORM_SCALE * target.norm.weight)
        self.inv_freq = torch.tensor(layer.rope.inv_freq, device=target.device)

    def forward(self, embedded: Tensor, previous: Tensor, earlier: KeysValues) -> Tensor:
        """Embeddings of the tokens and states of the tokens before -> states, all [texts, length, hidden].
        `earlier`: keys and values of the depths before; those of this depth are appended."""
        x = self.mix(torch.cat((unit(embedded), unit(previous).to(embedded.dtype)), dim=-1)).float()
        x = x + self.o_proj(self._attend(self.input_layernorm(x), earlier))
        y = self.post_attention_layernorm(x)
        x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        states: Tensor = self.norm(x)
        return states

    def _attend(self, x: Tensor, earlier: KeysValues) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.inv_freq
        q, k = (_rotate(heads, angles.cos(), angles.sin()) for heads in (q, k))
        shared_by = self.attention.num_heads // self.attention.num_kv_heads
        earlier.append((k.repeat_interleave(shared_by, dim=1), v.repeat_interleave(shared_by, dim=1)))
        keys, values = (torch.cat(side, dim=2) for side in zip(*earlier, strict=True))
        mask = None if len(earlier) == 1 else visible_positions(x.shape[1], len(earlier) - 1, x.device)
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.attention.scale
        )
        return attended.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)
        return heads

    def tensors(self) -> dict[str, Tensor]:
        """The weights under their names in a checkpoint."""
        where = {"joint": "joint", "mix": "mix", "norm": "norm"} | {
            name: f"layers.0.{part}{name}"
            for part, names in {
                "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
                "mlp.": ("gate_proj", "up_proj", "down_proj"),
                "": ("input_layernorm", "post_attention_layernorm"),
            }.items()
            for name in names
        }
        return {f"{where[name.split('.')[0]]}.weight": value for name, value in self.state_dict().items()}


class _Norm(nn.RMSNorm):
    """RMSNorm in float32, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class WholeTextAttention(StepAttention):
    """Causal attention over whole texts of equal length, without a cache."""

    def __init__(self, length: int) -> None:
        self._length = length

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        refuse_unusual_attention((layer,))
        q, k, v = (heads.unflatten(0, (-1, self._length)).transpose(1, 2) for heads in (q, k, v))
        grouped = layer.num_heads != layer.num_kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)


def visible_positions(length: int, depth: int, device: torch.device) -> Tensor:
    """[length, (depth + 1) * length] bool: the keys of all depths that each position of `depth` attends to."""
    position = torch.arange(length, device=device)
    before = position[:, None] - position
    return torch.cat([before >= depth, *(before == depth - other for other in range(1, depth + 1))], dim=1)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
