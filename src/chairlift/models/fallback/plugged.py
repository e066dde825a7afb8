"""A model of transformers whose attention is ours."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.models.fallback.adapters.base import AttentionAdapter
from chairlift.models.fallback.probe import AskedMask, CannotPlug, Handler

REGISTERED_NAME = "chairlift_ragged"
ADAPTED_NAME = "chairlift_adapted"  # Models with an adapter, which does not read the mask, have it.
# What computes the attention of the forward pass that is running. Not passed as an argument, because not every model
# class passes keyword arguments on to its attention.
_handler: ContextVar[Handler] = ContextVar("handler")


def register_attention() -> None:
    """Register our attention and masks in transformers by name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(REGISTERED_NAME, _attention)
    AttentionMaskInterface.register(REGISTERED_NAME, _mask)
    AttentionMaskInterface.register(ADAPTED_NAME, _no_mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **further: Any
) -> tuple[Tensor, None]:
    return _handler.get()(module, query, key, value, attention_mask, further), None


def _mask(*, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> AskedMask:
    return AskedMask(mask_function, local_size)


def _no_mask(**kwargs: Any) -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True, slots=True)
class PluggedModel:
    """A model class with its layers, and the adapter that replaced its attention, if it has one."""

    shell: Any
    backbone: Any
    adapter: AttentionAdapter | None

    @property
    def follows_interface(self) -> bool:
        """Whether its class is said to use the attention that is registered in transformers, or has an adapter."""
        return self.adapter is not None or bool(self.shell._supports_attention_backend)

    def hidden_states(self, tokens: Tensor, positions: Tensor, handler: Handler) -> Tensor:
        """Run the layers on tokens, positions [T] -> [T, hidden]; `handler` computes the attention."""
        further: dict[str, Any] = {}
        if self.adapter is None or self.adapter.takes_positions:
            further["position_ids"] = positions[None]
        if self.adapter is not None:
            self.adapter.positions, self.adapter.handler = positions, handler
        token = _handler.set(handler)
        try:
            output = self.backbone(
                input_ids=tokens[None],
                # No token is padding. Given explicitly, or transformers looks for sequence boundaries in the positions.
                attention_mask=torch.ones(1, len(tokens), dtype=torch.bool, device=tokens.device),
                use_cache=False,
                **further,
            )
        finally:
            _handler.reset(token)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class SeparateHead:
    """Everything after the final norm: the head, and whatever scaling or capping the model's class adds.

    The class runs with its backbone replaced by one that returns the hidden states it is given.
    """

    def __init__(self, shell: Any) -> None:
        prefix = shell.base_model_prefix
        if shell.base_model is shell or not hasattr(shell, prefix):
            raise CannotPlug("its head cannot be separated from its layers")
        setattr(shell, prefix, _HandBack())
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._shell(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


class _HandBack(torch.nn.Module):
    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly((inputs_embeds,))

    @property
    def decoder(self) -> _HandBack:
        """Some classes (OPT) call a part of their backbone instead of the whole."""
        return self


class _HiddenOnly(tuple[Tensor]):
    """A model output with hidden states and nothing else, in both styles of access."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
