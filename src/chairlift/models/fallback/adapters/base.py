"""What an adapter replaces in a model class of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.models.fallback.probe import Handler, causal_mask

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
        layer = NumberedLayer(index)
        output = self.handler(layer, q, k, v, causal_mask(window), {"scaling": scale})
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


class InnerAttention(AttentionAdapter):
    """For classes with a method `_attn` between the projections, which takes and returns [1, heads, T, head_dim]."""

    def replace(self, module: Any, index: int) -> None:
        scale, window = self.scale(module), self.window(module)

        def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, None]:
            return self.attend(index, query, key, value, scale=scale, window=window).transpose(1, 2), None

        module._attn = attention

    @abstractmethod
    def scale(self, module: Any) -> float:
        """What the products of queries and keys are multiplied by."""

    def window(self, module: Any) -> int | None:
        return None
