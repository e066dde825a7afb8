"""What a decoder needs from its layer stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.embedding import Embedding
from chairlift.layers.norm import Norm
from chairlift.layers.per_layer_input import PerLayerEmbedding
from chairlift.layers.rope import Rope, RotaryEmbedding, Rotation
from chairlift.loading.weight_cache.store import WeightStore
from chairlift.models.base import HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer

MANY_ROWS = 256  # on a GPU, computing a row more in one layer takes less time than dropping it, up to so many rows


@dataclass(frozen=True, slots=True)
class StackParts:
    """What a stack runs."""

    config: DecoderConfig
    embedding: Embedding
    layers: Sequence[DecoderLayer]
    rotary: Mapping[Rope, RotaryEmbedding]
    norm: Norm
    per_layer: PerLayerEmbedding | None = None

    def first(self, count: int) -> StackParts:
        return replace(self, layers=self.layers[:count])

    def rotations(self, positions: Tensor) -> dict[Rope, Rotation]:
        return {rope: rotary(positions) for rope, rotary in self.rotary.items()}


class LayerStack(ABC):
    """Runs a decoder from tokens to hidden states: embedding, layers, final norm."""

    has_own_threads = False  # it runs on threads of its own instead of torch's
    is_one_kernel = False  # all layers are one call of a CPU kernel

    def __init__(self, parts: StackParts) -> None:
        self.parts = parts

    def before_packing(self, layer: DecoderLayer) -> None:
        """Called once for each layer when all its weights are filled, before they are packed."""
        return

    def restore(self, store: WeightStore) -> None:
        """Called once, before weights are filled: use those that the store has of all layers together."""
        return

    def keep(self, store: WeightStore) -> None:
        """Called once all weights are packed, before `finalize`: give the store those of all layers together."""
        return

    def finalize(self) -> None:
        """Called once all weights are filled and packed."""
        return

    @abstractmethod
    def first(self, count: int) -> LayerStack:
        """A stack of the first `count` layers, which shares all weights with this one."""

    @abstractmethod
    def __call__(
        self,
        batch: StepBatch,
        attention: StepAttention,
        taps: Sequence[int],
        rows: Tensor | None,
    ) -> HiddenStates:
        """As `CausalLM.hidden_states`, with the inputs of the layers `taps`."""


def picked(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `x`, or all of them."""
    if rows is None:
        return x
    if not on_gpu(x.device):
        return x.index_select(0, rows)
    from chairlift.kernels.triton.launch import picked_rows

    return picked_rows(x, rows)
