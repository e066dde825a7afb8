"""Adapters for model classes of transformers with attention code of their own, by model type."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.models.fallback.probe import Handler, causal_mask
from chairlift.registry import Registry

BIAS_ALIGNMENT = 16  # heads that carry a bias are widened to a multiple of this


@dataclass(frozen=True, slots=True)
class NumberedLayer:
    """Stands in for an attention module, which a handler only asks for its number."""

    layer_idx: int


class AttentionAdapter(ABC):
    """Replaces the attention inside a model, keeping its weights and everything around it.

    The adapter of a model has the positions and the handler of the step that is computed, because these classes do not
    pass keyword arguments on to their attention.
    """

    attention_class: ClassVar[str]
    takes_positions: ClassVar[bool] = True  # the model's forward pass has `position_ids`
    length_fields: ClassVar[tuple[str, ...]] = ()  # The config may have the longest sequence in these.
    default_length: ClassVar[int | None] = None  # the longest sequence if the config does not state it

    positions: Tensor
    handler: Handler

    def attach(self, shell: Any) -> None:
        """Replace the attention of every layer."""
        modules = [module for module in shell.modules() if type(module).__name__ == self.attention_class]
        for index, module in enumerate(modules):
            self.replace(module, index)

    @abstractmethod
    def replace(self, module: Any, index: int) -> None:
        """Make one attention module call `attend`."""

    def attend(
        self,
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """q, k, v [1, heads, T, head_dim] -> [1, T, heads, head_dim]; `bias` [T, heads] is added to keys' scores."""
        head_dim = v.shape[-1]
        q, k = q.to(v.dtype), k.to(v.dtype)
        if bias is not None:
            q, k, v = with_bias(q, k, v, bias, scale)
        output = self.handler(NumberedLayer(index), q, k, v, causal_mask(window), {"scaling": scale})
        return output[..., :head_dim]


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Widen the heads so that a key carries its bias: any attention kernel then adds it, without knowing of it.

    The bias is split in two numbers, because one in 16 bits, as the cache may have them, would be too coarse at far
    positions.
    """
    if k.shape[1] != q.shape[1]:  # the bias differs between heads, so they cannot share their keys
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    width = -(k.shape[-1] + 2) % BIAS_ALIGNMENT
    high = bias.bfloat16().to(k.dtype)
    low = (bias - high.to(bias.dtype)).to(k.dtype)
    carried = torch.stack((high, low), dim=-1).transpose(0, 1)[None]  # [1, heads, T, 2]
    selecting = q.new_full((*q.shape[:-1], 2), 1 / scale)
    q, k = torch.cat((q, selecting), dim=-1), torch.cat((k, carried), dim=-1)
    return F.pad(q, (0, width)), F.pad(k, (0, width)), F.pad(v, (0, width + 2))


ADAPTERS: Registry[type[AttentionAdapter]] = Registry("adapter", __name__, separator="_", grouped=True)


def find_adapter(model_type: str) -> AttentionAdapter | None:
    """A new adapter for a model type, if there is one."""
    name = model_type.replace("-", "_")
    return ADAPTERS.get(name)() if name in ADAPTERS.names() else None


# ---- classes with a method between their projections -----------------------------------------------------------------


class InnerAttention(AttentionAdapter):
    """For classes with a method `_attn` between the projections, which takes and returns [1, heads, T, head_dim]."""

    divisor: ClassVar[str]  # The module has under this name what the products of queries and keys are divided by.

    def replace(self, module: Any, index: int) -> None:
        scale, window = self.scale(module), self.window(module)

        def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, None]:
            return self.attend(index, query, key, value, scale=scale, window=window).transpose(1, 2), None

        module._attn = attention

    def scale(self, module: Any) -> float:
        return float(1 / getattr(module, self.divisor))

    def window(self, module: Any) -> int | None:
        return None


@ADAPTERS.register("gptj")
class GPTJAdapter(InnerAttention):
    attention_class, divisor = "GPTJAttention", "scale_attn"


@ADAPTERS.register("codegen")
class CodeGenAdapter(InnerAttention):
    attention_class, divisor = "CodeGenAttention", "scale_attn"


@ADAPTERS.register("gpt_neox_japanese")
class GPTNeoXJapaneseAdapter(InnerAttention):
    attention_class, divisor = "GPTNeoXJapaneseAttention", "norm_factor"


@ADAPTERS.register("gpt_neo")
class GPTNeoAdapter(InnerAttention):
    """Unscaled scores, and a sliding window in its local layers."""

    attention_class = "GPTNeoSelfAttention"

    def scale(self, module: Any) -> float:
        return 1.0

    def window(self, module: Any) -> int | None:
        return int(module.config.window_size) if module.attention_type == "local" else None


@ADAPTERS.register("openai_gpt")
class GPTAdapter(AttentionAdapter):
    """GPT, the first one."""

    attention_class = "Attention"

    def replace(self, module: Any, index: int) -> None:
        def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
            scale = v.shape[-1] ** -0.5 if module.scale else 1.0
            return [self.attend(index, q, k.transpose(2, 3), v, scale=scale).transpose(1, 2)]

        module._attn = attention


# ---- classes whose whole forward pass is replaced --------------------------------------------------------------------


@ADAPTERS.register("xglm")
class XGLMAdapter(AttentionAdapter):
    attention_class = "XGLMAttention"

    def replace(self, module: Any, index: int) -> None:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            q, k, v = (
                project(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
                for project in (module.q_proj, module.k_proj, module.v_proj)
            )
            return module.out_proj(self.attend(index, q, k, v, scale=module.scaling).flatten(2)), None

        module.forward = forward


@ADAPTERS.register("bloom")
class BloomAdapter(AttentionAdapter):
    """ALiBi instead of positions."""

    attention_class = "BloomAttention"
    takes_positions = False
    length_fields = ("seq_length", "n_positions")
    default_length = 2048  # The published models have it; ALiBi has no limit of its own.

    def replace(self, module: Any, index: int) -> None:
        slopes = alibi_slopes(module.num_heads)

        def forward(hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            _, rows, size = hidden_states.shape
            fused = module.query_key_value(hidden_states).view(1, rows, module.num_heads, 3, module.head_dim)
            q, k, v = fused.permute(3, 0, 2, 1, 4)
            bias = self.positions[:, None] * slopes.to(self.positions.device)
            output = self.attend(index, q, k, v, scale=module.inv_norm_factor, bias=bias)
            return module.dense(output.reshape(1, rows, size)) + residual, None

        module.forward = forward


def alibi_slopes(num_heads: int) -> Tensor:
    """[heads] float32: what a head's scores grow by with every position of the key."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(first + between, device="cpu")


@ADAPTERS.register("mpt")
class MptAdapter(AttentionAdapter):
    """ALiBi with slopes of its own, and projections that may be clipped."""

    attention_class = "MptAttention"
    takes_positions = False
    length_fields = ("max_seq_len",)
    steepest = 8  # the exponent of the last slope; transformers builds the bias with it, whatever the config says

    def replace(self, module: Any, index: int) -> None:
        slopes = self.slopes(module.n_heads)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            _, rows, size = hidden_states.shape
            fused = module.Wqkv(hidden_states)
            if module.clip_qkv:
                fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
            q, k, v = fused.view(1, rows, 3, module.n_heads, module.head_dim).permute(2, 0, 3, 1, 4)
            bias = self.positions[:, None] * slopes.to(self.positions.device)
            output = self.attend(index, q, k, v, scale=module.softmax_scale, bias=bias)
            return module.out_proj(output.reshape(1, rows, size)), None

        module.forward = forward

    def slopes(self, num_heads: int) -> Tensor:
        """[heads] float32: those of the next power of two, every second one first if there are fewer heads."""
        power = 2 ** math.ceil(math.log2(num_heads))
        slopes = [2 ** (-self.steepest * (head + 1) / power) for head in range(power)]
        if power != num_heads:
            slopes = (slopes[1::2] + slopes[::2])[:num_heads]
        return torch.tensor(slopes, device="cpu")


@ADAPTERS.register("falcon")
class FalconAdapter(AttentionAdapter):
    """Rotary positions, or ALiBi in its oldest models."""

    attention_class = "FalconAttention"

    def replace(self, module: Any, index: int) -> None:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        # transformers computes the bias in 16 bits, and the models were trained with it
        slopes = alibi_slopes(module.num_heads).bfloat16()

        def forward(
            hidden_states: Tensor, alibi: Tensor | None, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            q, k, v = self.split(module, module.query_key_value(hidden_states))
            bias = None
            if alibi is None:
                q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            else:
                bias = (self.positions[:, None] * slopes.to(self.positions.device)).float() * module.inv_norm_factor
            output = self.attend(index, q, k, v, scale=module.inv_norm_factor, bias=bias)
            return module.dense(output.flatten(2)), None

        module.forward = forward

    def split(self, module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fused projection [1, T, size] -> q, k, v [1, heads or kv_heads, T, head_dim]."""
        if module.new_decoder_architecture or not module.multi_query:  # a group of queries, its key, its value, ...
            groups = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
            q, k, v = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
        else:  # all queries, one key, one value
            q, k, v = torch.split(fused.unflatten(-1, (-1, module.head_dim)), [module.num_heads, 1, 1], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
