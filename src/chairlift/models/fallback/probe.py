"""Finding out what attention an unknown model needs, by running it on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chairlift.attention.interface import AttentionLayer

# Arguments without effect here: the mask has the window and the direction, and there is no cache.
HARMLESS = {
    "dropout",
    "sliding_window",
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
# What handles one layer's attention: (module, q, k, v, mask, further arguments) -> output, all in the layout
# of transformers: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.
Handler = Callable[[Any, Tensor, Tensor, Tensor, Any, dict[str, Any]], Tensor]
# Rope types that change all rotations when one sequence of the batch passes the trained length.
VARYING_ROPES = {"dynamic", "longrope"}
FULL = 2**16  # a mask without a stated window is checked this far


class CannotPlug(Exception):
    """Our attention cannot replace the model's own; the message says why."""


@dataclass(frozen=True, slots=True)
class AskedMask:
    """Stands in for the mask tensor: the predicate a model's mask would be made of, and its stated window."""

    visible: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> bool
    window: int | None

    def __getitem__(self, parts: Any) -> AskedMask:
        """The mask itself: some models slice theirs to the rows that they need, which are all of them here."""
        if any(part not in (slice(None), slice(0, None)) for part in parts):
            raise CannotPlug("it computes its attention mask from values")
        return self

    def checked_window(self) -> int | None:
        """The window, after checking that the predicate is causal with exactly that window."""
        size = self.window or FULL
        zero = torch.zeros((), dtype=torch.int64)
        for query in (0, 1, size - 1, size, size + 1, 2 * size, 3 * size - 1):
            edges = (0, query // 2, query - size, query, query + size)
            keys = torch.tensor([edge + step for edge in edges for step in (-1, 0, 1)]).clamp(min=0)
            expected = keys <= query
            if self.window is not None:
                expected &= keys > query - size
            actual = self.visible(zero, zero, torch.tensor(query), keys)
            if not torch.equal(actual.expand_as(expected), expected):
                raise CannotPlug("its attention mask is neither causal nor a causal sliding window")
        return self.window


def causal_mask(window: int | None) -> AskedMask:
    """The mask of attention to a token itself and the tokens before it, or the `window` last of these."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - (FULL * FULL if window is None else window))

    return AskedMask(visible, window)


def rotate_by_values(shell: Any) -> None:
    """Let rotations that depend on the longest position compute on a CPU, in a model on the meta device.

    There positions have no values to compare. The rotations have no weights, so that they can be built anew.
    """
    for module in shell.modules():
        types = getattr(module, "rope_type", None)
        if VARYING_ROPES.intersection(types.values() if isinstance(types, dict) else [types]):
            with torch.device("cpu"):
                module.forward = partial(_on_cpu, type(module)(module.config))


def _on_cpu(rotation: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors on the meta device that a rotation makes of such tensors, for position 0."""

    def real(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value

    output = rotation(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
    return tuple(part.to("meta") for part in output) if isinstance(output, tuple) else output.to("meta")


class AttentionRecorder:
    """An attention handler that records the shape of each layer and refuses what is not supported."""

    def __init__(self) -> None:
        self._layers: dict[int, AttentionLayer] = {}

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, further: dict[str, Any]) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self._layers:
            raise CannotPlug("its attention layers are not numbered, or one attends twice")
        _, heads, rows, head_dim = q.shape
        if k.shape[:-1] != v.shape[:-1] or k.shape[2:] != (rows, head_dim) or heads % k.shape[1]:
            raise CannotPlug(
                f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} of layer {index} "
                "do not belong together"
            )
        if not isinstance(mask, AskedMask):
            raise CannotPlug("it builds its attention mask itself")
        scale, sinks = further.pop("scaling", None), further.pop("s_aux", None)
        if sinks is not None and sinks.shape != (heads,):
            raise CannotPlug(f"its attention has sinks of the shape {list(sinks.shape)} for {heads} heads")
        self._layers[index] = AttentionLayer(
            index=index,
            num_heads=heads,
            num_kv_heads=k.shape[1],
            head_dim=max(head_dim, v.shape[-1]),
            scale=head_dim**-0.5 if scale is None else float(scale),
            window=mask.checked_window(),
            softcap=further.pop("softcap", None),
            sinks=sinks is not None,
        )
        unknown = sorted(name for name, value in further.items() if value is not None and name not in HARMLESS)
        if unknown:
            raise CannotPlug(f"its attention takes {', '.join(unknown)}, which is not supported")
        return q.new_empty(1, rows, heads, v.shape[-1])

    def layers(self, expected: int) -> tuple[AttentionLayer, ...]:
        """All layers in order; a model with layers of another kind in between is refused."""
        if sorted(self._layers) != list(range(expected)):
            raise CannotPlug(
                f"only {len(self._layers)} of its {expected} layers are attention layers that can be replaced"
            )
        return tuple(self._layers[index] for index in range(expected))
