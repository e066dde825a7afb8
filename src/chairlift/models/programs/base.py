"""How a decoder runs its layers: block by block as they are written, or by a program of fused operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.adapters import AdapterBank
from chairlift.layers.embedding import Embedding
from chairlift.layers.formats.base import WeightFormat
from chairlift.layers.norm import Norm
from chairlift.layers.per_layer_input import PerLayerEmbedding
from chairlift.layers.rope import Rope, RotaryEmbedding
from chairlift.loading.weight_cache.store import WeightCache
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.models.config import DecoderConfig
from chairlift.models.decoder_layer import DecoderLayer, LayerStep, pick_rows


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What a program runs."""

    config: DecoderConfig
    embedding: Embedding
    layers: Sequence[DecoderLayer]
    rotary: Mapping[Rope, RotaryEmbedding]
    norm: Norm
    per_layer: PerLayerEmbedding | None = None
    adapters: AdapterBank = field(default_factory=AdapterBank)

    def first(self, count: int) -> ModelParts:
        return replace(self, layers=self.layers[:count])

    def step(self, batch: StepBatch, attention: StepAttention) -> LayerStep:
        self.adapters.begin(batch.adapters)
        rotations = {rope: rotary(batch.positions, batch.rotary_positions) for rope, rotary in self.rotary.items()}
        return LayerStep(attention, batch.positions, rotations, batch.recurrent, pick_adapters=self.adapters.pick)

    def embed(self, batch: StepBatch, step: LayerStep) -> Tensor:
        """The residual stream in front of the first layer [T, hidden]; computes the layers' own inputs as well."""
        x = self.embedding(batch.tokens)
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        if self.per_layer is not None:
            step.all_inputs = self.per_layer(batch.tokens, x)
        return x


class LayerProgram(ABC):
    """Runs a decoder from tokens to hidden states: embedding, layers, final norm."""

    has_own_threads = False  # it runs on threads of its own instead of torch's
    is_one_kernel = False  # all layers are one call of a CPU kernel

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts

    def before_packing(self, layer: DecoderLayer) -> None:
        """Called once for each layer when all its weights are filled, before they are packed."""
        return

    def restore(self, cache: WeightCache) -> None:
        """Called once, before weights are filled: use those that the cache has of all layers together."""
        return

    def keep(self, cache: WeightCache) -> None:
        """Called once all weights are packed, before `finalize`: give the cache those of all layers together."""
        return

    def finalize(self) -> None:
        """Called once all weights are filled and packed."""
        return

    @abstractmethod
    def first(self, count: int) -> LayerProgram:
        """A program of the first `count` layers, which shares all weights with this one."""

    @abstractmethod
    def __call__(
        self, batch: StepBatch, attention: StepAttention, taps: Sequence[int], rows: Tensor | None
    ) -> HiddenStates:
        """As `CausalLM.hidden_states`, with the inputs of the layers `taps`."""


class PlainProgram(LayerProgram):
    """The layers one after the other, one operation at a time: runs every model with every attention."""

    def __init__(self, parts: ModelParts, *, has_own_threads: bool = False) -> None:
        """`has_own_threads`: products run on threads of their own, as the attention does."""
        super().__init__(parts)
        self.has_own_threads = has_own_threads

    def finalize(self) -> None:
        self.has_own_threads |= all(layer.in_blocks for layer in self.parts.layers)

    def first(self, count: int) -> PlainProgram:
        return PlainProgram(self.parts.first(count), has_own_threads=self.has_own_threads)

    def __call__(
        self, batch: StepBatch, attention: StepAttention, taps: Sequence[int], rows: Tensor | None
    ) -> HiddenStates:
        """In the last layer, rows that are not sampled only need K and V: the rest is computed for `rows` only.

        In a prompt that is one row, which saves 3% of its prefill in a model of 30 layers.
        """
        step = self.parts.step(batch, attention)
        x = self.parts.embed(batch, step)
        inputs, last = {}, len(self.parts.layers) - 1
        for index, layer in enumerate(self.parts.layers):
            if index in taps:
                inputs[index] = x.clone()
            step.enter(index)
            adds = batch.embeddings is not None and index < len(batch.embeddings.deep)
            x = layer(x, step, rows if index == last and not adds else None)
            if adds and batch.embeddings is not None:
                batch.embeddings.add_behind(index, x)
                x = x if rows is None or index < last else pick_rows(x, rows)
        return HiddenStates(self.parts.norm(x), [inputs[index] for index in taps])


def fuse(
    parts: ModelParts,
    format: type[WeightFormat],
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> LayerProgram:
    """The fastest program for the layers. Called before the weights are filled."""
    if on_gpu(device):
        from chairlift.models.programs import fuse_gpu  # triton is not needed on a CPU

        return fuse_gpu.fuse(parts, format, dtype=dtype, device=device, batch_invariant=batch_invariant)
    if format.traits.tile_type is not None or format.traits.becomes_blocks(dtype, device):
        from chairlift.models.programs import fuse_cpu  # numba is slow to import

        if fuse_cpu.can_fuse(parts.config):
            return fuse_cpu.fuse(parts, format)
    return PlainProgram(parts, has_own_threads=format.traits.tile_type is not None)


def fuse_layers(
    layers: Sequence[DecoderLayer], norm: Norm, device: torch.device
) -> Callable[[Tensor, LayerStep], Tensor]:
    """What runs some layers, and a norm behind them, on a residual stream [T, hidden]: those of a draft network."""
    if on_gpu(device):
        from chairlift.models.programs import fuse_gpu

        return fuse_gpu.fuse_layers(layers, norm)

    def run(x: Tensor, step: LayerStep) -> Tensor:
        for layer in layers:
            x = layer(x, step)
        return norm(x)

    return run


@contextmanager
def limit_torch_threads(model: CausalLM, attention: AttentionBackend) -> Iterator[None]:
    """Reduce torch to one thread while a program runs on its own: torch's threads spin after each small operation."""
    if not (model.has_own_threads and attention.capabilities.has_work):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
