"""What the engine asks of a model."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from chairlift.attention.base import Attend, AttentionLayer


class HiddenStates(NamedTuple):
    """What the layers compute for a batch."""

    last: Tensor  # [T, hidden], after the final norm
    taps: Tensor | None = None  # [taps, T, hidden]: the inputs of the tapped layers, of all rows


class CausalLM(Protocol):
    """A language model that reads a ragged batch: T tokens of many sequences, one after the other.

    There is no batch axis, no padding and no mask. Which token belongs to which sequence is known to `attend`
    alone; everything else in the model works on each token by itself.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_len(self) -> int:
        """The longest sequence the model can be given."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> HiddenStates:
        """Run the layers on tokens, positions [T] int64; `last` has only `rows` [S] if given.

        `rows` is int32 or int64, may be empty, and on a CPU must not repeat a row.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], the tokens that are sampled from -> [S, vocab], in the model's own type or float32."""
        ...

    def num_weight_bytes(self) -> int: ...


class ModelInfo(Protocol):
    """What a config alone tells about a model: enough to plan its memory."""

    @property
    def family(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_len(self) -> int: ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]: ...

    @property
    def num_parameters(self) -> int: ...
