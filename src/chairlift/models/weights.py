"""Filling a model's preallocated tensors from the stream of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.layers.parts import Target
from chairlift.loading.stored_weight import StoredWeight
from chairlift.models.config import DecoderConfig, LayerConfig
from chairlift.models.experts import ExpertNames
from chairlift.models.wrappers import HEAD, TextPart, canonical_name

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


def unstacked(
    layers: Sequence[LayerConfig], tensors: Iterable[tuple[str, Tensor | StoredWeight]]
) -> Iterator[tuple[str, Tensor | StoredWeight]]:
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
            if names.transposed and isinstance(matrix, Tensor) and not _is_upright(matrix, *side):
                matrix = matrix.t()
            for part, rows in zip(inner, _parts(matrix, len(inner), names), strict=True):
                yield f"{experts}.{expert}.{part}.{suffix}", rows


def _is_upright(matrix: Tensor, dimension: int, size: int) -> bool:
    """Whether only this dimension has the size: transformers writes some checkpoints otherwise than its models came."""
    return matrix.ndim == 1 or matrix.shape[dimension] == size != matrix.shape[1 - dimension]


def _parts(matrix: Tensor | StoredWeight, count: int, names: ExpertNames) -> Sequence[Tensor | StoredWeight]:
    """The rows of each of `count` parts that are stored as one matrix, or as one bias."""
    rows = torch.arange(matrix.shape[0])
    chosen = [rows[part::count] for part in range(count)] if names.interleaved else rows.chunk(count)
    if isinstance(matrix, StoredWeight):
        return [matrix.select_rows(each) for each in chosen]
    return [matrix.index_select(0, each) if names.interleaved else matrix[each[0] : each[-1] + 1] for each in chosen]


def dense_renamed(
    config: DecoderConfig, tensors: Iterable[tuple[str, Tensor | StoredWeight]]
) -> Iterator[tuple[str, Tensor | StoredWeight]]:
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
    tensors: Iterable[tuple[str, Tensor | StoredWeight]],
    *,
    text_part_only: bool,
    tied: bool,
    left_out: Sequence[str] = (),
    filled_one: Callable[[str], None] | None = None,
) -> None:
    """Copy every tensor of the stream to its target; each target must be filled exactly once.

    A filled target is removed from `targets`, and `filled_one` is called with its name, which may free the memory.
    With a `tied` head, the head's name is another name of the embedding table; a checkpoint may hold either, or both if
    they are equal. Tensors whose names begin with one of `left_out` are not needed.
    """
    left_out = (MTP_PREFIX, *left_out)
    text_part = TextPart(targets)
    filled: dict[str, str] = {}  # target -> the name it came under
    for full_name, tensor in tensors:
        name = decoder_name(full_name)
        if (
            name.endswith(DERIVED_SUFFIX)
            or name.startswith(left_out)
            or (text_part_only and not text_part.has(full_name))
        ):
            continue
        destination = EMBEDDING if tied and name == HEAD else name
        if filled.get(destination) == name:
            raise CorruptCheckpoint(f"tensor {full_name} is in the checkpoint more than once")
        if destination not in targets:
            raise CorruptCheckpoint(f"unexpected tensor {full_name} of shape {_shape(tensor)}")
        target = targets[destination]
        _check(full_name, tensor, target)
        if isinstance(target, Tensor) and isinstance(tensor, StoredWeight):
            tensor = tensor.dequantized()
        if destination not in filled:
            target.copy_(tensor)
            filled[destination] = name
            if destination != EMBEDDING:  # The embedding may come again as the head.
                del targets[destination], target
            if filled_one is not None:
                filled_one(destination)
        elif (
            isinstance(target, Tensor) and isinstance(tensor, Tensor) and not bool((target == tensor.to(target)).all())
        ):
            raise CorruptCheckpoint(
                f"{HEAD} and {EMBEDDING} differ, but config.json has tie_word_embeddings: set it to false there"
            )
    missing = sorted(targets.keys() - filled.keys())
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CorruptCheckpoint(f"the checkpoint lacks {', '.join(missing[:5])}{more}")


def _check(name: str, tensor: Tensor | StoredWeight, target: Target) -> None:
    if isinstance(tensor, Tensor) and not (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        raise UnsupportedModel(
            f"tensor {name} holds {tensor.dtype}, but config.json has no quantization_config that explains it"
        )
    if tensor.shape != target.shape:
        raise CorruptCheckpoint(f"tensor {name} has shape {_shape(tensor)}, but config.json implies {_shape(target)}")


def _shape(tensor: Target | StoredWeight) -> list[int]:
    return list(tensor.shape)
