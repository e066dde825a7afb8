"""Fills a decoder with the tensors of a checkpoint and packs each layer when it is complete."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chairlift.layers.formats.base import WeightFormat, WeightRows, restored_weight
from chairlift.layers.linear import Linear
from chairlift.layers.parts import Targets, prefixed
from chairlift.loading.stored_weight import StoredWeight
from chairlift.loading.weight_cache.store import WeightStore
from chairlift.models.decoder import Decoder
from chairlift.models.weights import EMBEDDING, dense_renamed, fill, unstacked
from chairlift.models.wrappers import HEAD


def targets(model: Decoder) -> Targets:
    """Every tensor a checkpoint must hold, and the part of the model that it fills."""
    if model.embedding.weight is not None:
        yield EMBEDDING, WeightRows(model.embedding.weight, 0, model.vocab_size)
    else:
        yield EMBEDDING, model.embedding.table
    for index, layer in enumerate(model.layers):
        yield from prefixed(f"layers.{index}", layer.targets())
    yield from model.norm.targets(model.config.names.final_norm)
    if not model.config.tied_head:
        yield from model.head.targets([HEAD.removesuffix(".weight")])
    if model.per_layer is not None:
        yield from model.per_layer.targets()


class DecoderLoader:
    """Loads the weights of one decoder. The store is asked before a weight is packed, and given it afterwards."""

    def __init__(self, model: Decoder, store: WeightStore | None = None) -> None:
        """Use the packed weights that the store has; what a checkpoint holds for them is then ignored."""
        self._model = model
        self._store = store or WeightStore()
        self._restore()
        self._num_missing = [sum(1 for _ in layer.targets()) for layer in model.layers]  # targets still to be filled

    def load(self, tensors: Iterable[tuple[str, Tensor | StoredWeight]]) -> None:
        """Fill the model from a stream of tensors, under the names of the checkpoint and in any order, and pack it."""
        self.fill(tensors)
        self.finalize()

    def fill(self, tensors: Iterable[tuple[str, Tensor | StoredWeight]]) -> None:
        """Fill every target; what is complete is packed at once."""
        config = self._model.config
        fill(
            dict(targets(self._model)),
            unstacked(config.layers, dense_renamed(config, tensors)),
            text_part_only=config.text_part_only,
            tied=config.tied_head,
            left_out=config.unused_prefixes,
            filled_one=self._pack_complete_layer,
        )

    def _pack_complete_layer(self, name: str) -> None:
        """Called after each target is filled: so memory never holds all weights unpacked."""
        if not name.startswith("layers."):
            return
        model, index = self._model, int(name.split(".")[1])
        self._num_missing[index] -= 1
        if self._num_missing[index] == 0:
            model.program.before_packing(model.layers[index])
            for number, linear in enumerate(model.layers[index].linears()):
                linear.finalize()
                self._keep(f"layers.{index}.{number}", linear.weight)

    def finalize(self) -> None:
        """Called once every target is filled. One part after the other, so that memory never holds two models."""
        model = self._model
        if model.embedding.weight is not None:
            model.embedding.weight = model.embedding.weight.finalized()
            self._keep(EMBEDDING, model.embedding.weight)
            self._tie_head()
        for part in model.parts():
            part.finalize()
        if not model.shares_table:
            self._keep(HEAD, model.head.weight)
        table_dtype = model.format.traits.table_dtype
        if model.embedding.weight is None:
            model.embedding.table = model.embedding.table.to(table_dtype)
        if model.per_layer is not None:
            model.per_layer.table = model.per_layer.table.to(table_dtype)
        model.program.keep(self._store)
        model.program.finalize()
        model.mapped_bytes = self._store.mapped_bytes
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # leave the memory of replaced weights to the KV cache

    def _restore(self) -> None:
        model = self._model
        for index, layer in enumerate(model.layers):
            for number, linear in enumerate(layer.linears()):
                linear.weight = self._restore_weight(f"layers.{index}.{number}", linear.weight)
        if model.embedding.weight is not None:
            model.embedding.weight = self._restore_weight(EMBEDDING, model.embedding.weight)
            self._tie_head()
        if not model.shares_table:
            model.head.weight = self._restore_weight(HEAD, model.head.weight)
        model.program.restore(self._store)

    def _tie_head(self) -> None:
        """Let a head that shares the table have it as it is now."""
        if self._model.shares_table and self._model.embedding.weight is not None:
            self._model.head = Linear(self._model.embedding.weight)

    def _restore_weight(self, name: str, weight: WeightFormat) -> WeightFormat:
        arrays = self._store.find(name)
        return weight if arrays is None else restored_weight(weight, arrays)

    def _keep(self, name: str, weight: WeightFormat) -> None:
        arrays = weight.packed_arrays()
        if arrays and not weight.restored:
            weight.use_arrays(self._store.keep(name, weight.name, arrays))
