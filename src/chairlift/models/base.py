"""What the engine needs from a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.recurrent import RecurrentLayer


class HiddenStates(NamedTuple):
    """What the layers compute for a batch."""

    last: Tensor  # [T, hidden], after the final norm
    taps: Sequence[Tensor] = ()  # [T, hidden] each: the inputs of the tapped layers, of all rows


class ModelSizes(Protocol):
    """What a model and its config alone both say."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_len(self) -> int:
        """The longest sequence the model can be given."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]: ...

    @property
    def recurrent_layers(self) -> tuple[RecurrentLayer, ...]: ...


class ModelInfo(ModelSizes, Protocol):
    """What follows from a config alone: enough to plan a model's memory."""

    @property
    def family(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...


class CausalLM(ModelSizes, Protocol):
    """A language model that reads a ragged batch: T tokens of many sequences, one after the other.

    There is no batch axis, no padding and no mask. Only `attention` and the states of recurrent layers depend on
    which token belongs to which sequence; everything else in the model works on each token on its own.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def hidden_states(self, batch: StepBatch, attention: StepAttention, rows: Tensor | None = None) -> HiddenStates:
        """Run the layers on a batch; `last` has only `rows` [S] if given.

        `rows` is int32 or int64, may be empty, and on a CPU must not repeat a row.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], the rows that are sampled -> [S, vocab], in the model's own type or float32."""
        ...

    def num_weight_bytes(self) -> int: ...

    def num_mapped_bytes(self) -> int:
        """Bytes of weights that are mapped from a file, whose pages the system counts as free memory."""
        ...

    @property
    def quantization(self) -> str:
        """The name of the weights' format; "none" if they are not quantized."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of the KV cache unless another is requested."""
        ...

    @property
    def has_own_threads(self) -> bool:
        """Whether its layers can run on threads of their own instead of torch's."""
        ...
