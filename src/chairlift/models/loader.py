"""Fills a decoder with the tensors of a checkpoint and packs each layer when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.formats.base import WeightFormat, WeightRows, restored_weight
from chairlift.layers.linear import Linear
from chairlift.layers.parts import Target, Targets, add_prefix
from chairlift.loading.stored_weight import NamedWeights, StoredWeight
from chairlift.loading.weight_cache.store import WeightCache
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.decoder import Decoder
from chairlift.models.experts import ExpertNames
from chairlift.models.wrappers import HEAD, TextPart, canonical_name


def targets(model: Decoder) -> Targets:
    """Every tensor a checkpoint must hold, and the part of the model that it fills."""
    if model.embedding.weight is not None:
        yield EMBEDDING, WeightRows(model.embedding.weight, 0, model.vocab_size)
    else:
        yield EMBEDDING, model.embedding.table
    for index, layer in enumerate(model.layers):
        yield from add_prefix(f"layers.{index}", layer.targets())
    yield from model.norm.targets(model.config.names.final_norm)
    if not model.config.tied_head:
        yield from model.head.targets([HEAD.removesuffix(".weight")])
    if model.per_layer is not None:
        yield from model.per_layer.targets()


class DecoderLoader:
    """Loads the weights of one decoder. The cache is asked before a weight is packed, and given it afterwards."""

    def __init__(self, model: Decoder, cache: WeightCache | None = None) -> None:
        """Use the packed weights that the cache has; what a checkpoint holds for them is then ignored."""
        self._model = model
        self._cache = cache or WeightCache()
        self._restore()
        self._num_missing = [sum(1 for _ in layer.targets()) for layer in model.layers]  # targets still to be filled

    def load(self, tensors: NamedWeights) -> None:
        """Fill the model from a stream of tensors, under the names of the checkpoint and in any order, and pack it."""
        self.fill(tensors)
        self.finalize()

    def fill(self, tensors: NamedWeights) -> None:
        """Fill every target; what is complete is packed at once."""
        config = self._model.config
        fill(
            dict(targets(self._model)),
            split_stacks(config.layers, rename_dense_blocks(config, tensors)),
            text_part_only=config.text_part_only,
            tied=config.tied_head,
            left_out=config.unused_prefixes,
            on_filled=self._pack_complete_layer,
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
        model.finalize()
        if not model.shares_table:
            self._keep(HEAD, model.head.weight)
        table_dtype = model.format.traits.table_dtype
        if model.embedding.weight is None:
            model.embedding.table = model.embedding.table.to(table_dtype)
        if model.per_layer is not None:
            model.per_layer.table = model.per_layer.table.to(table_dtype)
        model.program.keep(self._cache)
        model.program.finalize()
        model.mapped_bytes = self._cache.mapped_bytes
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
        model.program.restore(self._cache)

    def _tie_head(self) -> None:
        """Let a head that shares the table have it as it is now."""
        if self._model.shares_table and self._model.embedding.weight is not None:
            self._model.head = Linear(self._model.embedding.weight)

    def _restore_weight(self, name: str, weight: WeightFormat) -> WeightFormat:
        arrays = self._cache.find(name)
        return weight if arrays is None else restored_weight(weight, arrays)

    def _keep(self, name: str, weight: WeightFormat) -> None:
        arrays = weight.packed_arrays()
        if arrays and not weight.restored:
            weight.use_arrays(self._cache.keep(name, weight.name, arrays))


# Tables of old checkpoints that follow from the config.
DERIVED_SUFFIX = "rotary_emb.inv_freq"
# Layers that predict further tokens, in checkpoints that name them apart.
MTP_PREFIX = "mtp"

EMBEDDING = "embed_tokens.weight"
OTHER_EMBEDDING = "embeddings.weight"  # Families of Mamba 2 call it so.


def decoder_name(full_name: str) -> str:
    """The name of a tensor in a decoder."""
    name = canonical_name(full_name)
    return EMBEDDING if name == OTHER_EMBEDDING else name


def split_stacks(layers: Sequence[LayerConfig], tensors: NamedWeights) -> NamedWeights:
    """The stream with each expert's weights on their own, also where the checkpoint holds those of a layer stacked."""
    stacks: dict[str, tuple[ExpertNames, str, tuple[str, ...], tuple[int, int]]] = {}
    for index, layer in enumerate(layers):
        if layer.experts is not None:
            names, size = layer.experts.names, layer.intermediate_size
            block = f"layers.{index}.{names.block}"
            experts = f"{block}.{names.experts}"
            stacks[f"{block}.{names.stacked_gate_up}"] = (names, experts, names.inner, (0, size * len(names.inner)))
            stacks[f"{block}.{names.stacked_down}"] = (names, experts, (names.down,), (1, size))
    for full_name, tensor in tensors:
        name = decoder_name(full_name)
        suffix, dimensions = ("bias", 2) if name.endswith("_bias") else ("weight", 3)
        stack = stacks.get(name.removesuffix("_bias"))
        if stack is None or len(tensor.shape) != dimensions:
            yield full_name, tensor
            continue
        names, experts, inner, side = stack
        for expert, matrix in enumerate(tensor.matrices() if isinstance(tensor, StoredWeight) else tensor):
            if names.transposed and isinstance(matrix, Tensor) and matrix.ndim > 1:
                # transformers writes some checkpoints otherwise than its models came: only one dimension has the size.
                axis, size = side
                is_upright = matrix.shape[axis] == size != matrix.shape[1 - axis]
                matrix = matrix if is_upright else matrix.t()
            for part, rows in zip(inner, _split_rows(matrix, len(inner), names), strict=True):
                yield f"{experts}.{expert}.{part}.{suffix}", rows


def _split_rows(matrix: Tensor | StoredWeight, count: int, names: ExpertNames) -> Sequence[Tensor | StoredWeight]:
    """The rows of each of `count` parts that are stored as one matrix, or as one bias."""
    rows = torch.arange(matrix.shape[0])
    chosen = [rows[part::count] for part in range(count)] if names.interleaved else rows.chunk(count)
    if isinstance(matrix, StoredWeight):
        return [matrix.select_rows(each) for each in chosen]
    return [matrix.index_select(0, each) if names.interleaved else matrix[each[0] : each[-1] + 1] for each in chosen]


def rename_dense_blocks(config: DecoderConfig, tensors: NamedWeights) -> NamedWeights:
    """The stream with the usual names of dense blocks, also where transformers wrote those of mixtures for them."""
    blocks = {layer.experts.names.block for layer in config.layers if layer.experts is not None} - {config.names.mlp}
    dense = {
        f"layers.{index}.{block}.": f"layers.{index}.{config.names.mlp}."
        for index, layer in enumerate(config.layers)
        if layer.experts is None and layer.intermediate_size
        for block in blocks
    }
    for full_name, tensor in tensors:
        name = decoder_name(full_name)
        prefix = next((prefix for prefix in dense if name.startswith(prefix)), None)
        yield full_name if prefix is None else dense[prefix] + name.removeprefix(prefix), tensor


def fill(
    targets: dict[str, Target],
    tensors: NamedWeights,
    *,
    text_part_only: bool,
    tied: bool,
    left_out: Sequence[str] = (),
    on_filled: Callable[[str], None] | None = None,
) -> None:
    """Copy every tensor of the stream to its target; each target must be filled exactly once.

    A filled target is removed from `targets`, and `on_filled` is called with its name, which may free the memory.
    With a `tied` head, the head's name is another name of the embedding table; a checkpoint may hold either, or both if
    they are equal. Tensors whose names begin with one of `left_out` are not needed.
    """
    left_out = (MTP_PREFIX, *left_out)
    text_part = TextPart(targets)
    filled: dict[str, str] = {}  # target -> the name it came under
    for full_name, tensor in tensors:
        name = decoder_name(full_name)
        is_outside = text_part_only and not text_part.has(full_name)
        if is_outside or name.endswith(DERIVED_SUFFIX) or name.startswith(left_out):
            continue
        destination = EMBEDDING if tied and name == HEAD else name
        if filled.get(destination) == name:
            raise CorruptCheckpoint(f"tensor {full_name} is in the checkpoint more than once")
        if destination not in targets:
            raise CorruptCheckpoint(f"unexpected tensor {full_name} of shape {list(tensor.shape)}")
        target = targets[destination]
        _check_form(full_name, tensor, target)
        if isinstance(target, Tensor) and isinstance(tensor, StoredWeight):
            tensor = tensor.dequantized()
        if destination in filled:
            _check_tie(target, tensor)
            continue
        target.copy_(tensor)
        filled[destination] = name
        if destination != EMBEDDING:  # The embedding may come again as the head.
            del targets[destination], target
        if on_filled is not None:
            on_filled(destination)
    missing = sorted(targets.keys() - filled.keys())
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CorruptCheckpoint(f"the checkpoint lacks {', '.join(missing[:5])}{more}")


def _check_form(full_name: str, tensor: Tensor | StoredWeight, target: Target) -> None:
    if isinstance(tensor, Tensor) and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        problem = f"tensor {full_name} holds {tensor.dtype}"
        raise UnsupportedModel(f"{problem}, but config.json has no quantization_config that explains it")
    if tensor.shape != target.shape:
        stored, implied = list(tensor.shape), list(target.shape)
        raise CorruptCheckpoint(f"tensor {full_name} has shape {stored}, but config.json implies {implied}")


def _check_tie(target: Target, tensor: Tensor | StoredWeight) -> None:
    """Compare a head with the embedding table; one that is kept in blocks is not compared."""
    if isinstance(target, Tensor) and isinstance(tensor, Tensor) and not bool((target == tensor.to(target)).all()):
        raise CorruptCheckpoint(
            f"{HEAD} and {EMBEDDING} differ, but config.json has tie_word_embeddings: set it to false there"
        )
