"""The memory that a model's weights take in a format, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import WeightFormat, head_format
from chairlift.layers.formats.none import PlainWeight
from chairlift.models import describe, is_native
from chairlift.models.decoder import Decoder
from chairlift.models.encoder import EncoderConfig
from chairlift.models.fallback.model import FallbackInfo
from chairlift.models.read_config import decoder_config


def weight_bytes(config: Mapping[str, Any], format: type[WeightFormat], dtype: torch.dtype, device: str) -> int:
    """About the bytes of the weights in a format, where all that it does not store is in `dtype`."""
    info = describe(config)
    if isinstance(info, (FallbackInfo, EncoderConfig)):
        in_format = [(format, *shape) for shape in info.linear_shapes]
        shared = info.num_shared_parameters
        if format is PlainWeight:  # transformers keeps them so, a tied head once.
            in_format, shared = [], 0
    else:
        in_format, shared = _decoder_linears(config, format, dtype, device)
    stored = sum(each.stored_bytes(out, size, dtype) for each, out, size in in_format)
    others = info.num_parameters - sum(out * size for _, out, size in in_format) + shared
    table = info.vocab_size * info.hidden_size
    table_type = format.traits.table_dtype or dtype
    saved = table * (dtype.itemsize - table_type.itemsize) if is_native(config) else 0
    return round(stored + others * dtype.itemsize - saved)


def microscaled_bytes(config: Mapping[str, Any], dtype: torch.dtype) -> int:
    """The bytes of the weights where experts stay as an MXFP4 checkpoint stores them, and all else is in `dtype`."""
    decoder = Decoder(decoder_config(config), dtype=dtype, device=torch.device("meta"))
    blocks = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
    experts = [weights for block in blocks for weights in (block.gate_up, block.down)]
    saved = sum(weights.num_bytes - weights.microscaled_bytes for weights in experts)
    return weight_bytes(config, PlainWeight, dtype, "cuda") - saved


def _decoder_linears(
    config: Mapping[str, Any], format: type[WeightFormat], dtype: torch.dtype, device: str
) -> tuple[list[tuple[type[WeightFormat], int, int]], int]:
    """The formats and shapes of the linear maps that are not plain, and how many of their weights are also in the
    table."""
    decoder = Decoder(decoder_config(config), dtype=torch.bfloat16, device=torch.device("meta"))
    linears = [linear for layer in decoder.layers for linear in layer.linears()]
    table = decoder.vocab_size * decoder.hidden_size
    tied, packs_head = decoder.config.tied_head, device == "cpu" or format is not PlainWeight
    shapes = [(format, linear.out_features, linear.in_features) for linear in linears]
    blocks = format.traits.expert_blocks if device == "cpu" else None
    if format.traits.rounds_experts or blocks is not None:
        mixtures = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
        products = (product.shape for each in mixtures for product in (each.gate_up, each.down))
        of_experts = format if blocks is None else FORMATS.get(blocks)
        shapes += [(of_experts, experts * out, size) for experts, out, size in products]
    if format.traits.becomes_blocks(dtype, torch.device(device)):  # The table does, too; a tied head shares it.
        of_head = head_format(format, dtype, torch.device(device), quantize=False)
        return shapes + [(of_head, decoder.vocab_size, decoder.hidden_size)] * (1 if tied else 2), 0
    if format.traits.stores_head and packs_head:
        return [*shapes, (format, decoder.vocab_size, decoder.hidden_size)], table if tied else 0
    return shapes, 0
