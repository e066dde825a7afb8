"""Starts what a model needs to read images, and says what it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.core.encoder_cache import EncoderCache
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.stored_weight import dequantized
from chairlift.models import is_native
from chairlift.models.base import CausalLM
from chairlift.models.wrappers import TextPart, canonical_name, kind
from chairlift.options import format_bytes
from chairlift.text.tokenizer import Tokenizer
from chairlift.vision.encoder import VisionEncoder
from chairlift.vision.processor import ImageProcessor
from chairlift.vision.support import image_obstacle

log = logging.getLogger("chairlift")

MEGAPIXEL = (1024, 1024)


@dataclass(frozen=True, slots=True)
class ModelImages:
    """How a model reads images."""

    encoder: VisionEncoder
    processor: ImageProcessor
    bytes_per_row: int  # what the cache of encoded images holds for a token
    memory: int  # bytes of the cache

    def cache(self) -> EncoderCache:
        return EncoderCache(max(1, self.memory // self.bytes_per_row))

    def lines(self) -> list[str]:
        """The arithmetic, for the start-up log."""
        tokens, patches = self.processor.tokens_of(*MEGAPIXEL)
        rows, each = self.cache().capacity, self.bytes_per_row
        return [
            f"images     {format_bytes(self.encoder.num_bytes)} of vision weights; a picture of {MEGAPIXEL[0]} x "
            f"{MEGAPIXEL[1]} pixels is {tokens:,} tokens, of {patches:,} patches",
            f"           {format_bytes(self.memory)} for encoded images: {rows:,} tokens of {each:,} bytes",
        ]


def load_images(
    checkpoint: Checkpoint, model: CausalLM, tokenizer: Tokenizer, *, wanted: str, memory: int
) -> ModelImages | None:
    """Load what reads images; None for models that do not, or that cannot here, which the log says."""
    obstacle = image_obstacle(checkpoint.config, checkpoint.format, model.device.type, wanted)
    if obstacle is not None and (wanted == "off" or "vision" not in (kind(checkpoint.config) or "")):
        return None
    try:
        if obstacle is not None:
            raise UnsupportedModel(obstacle)
        processor = ImageProcessor(checkpoint.path, checkpoint.config, tokenizer)
        encoder = VisionEncoder(
            checkpoint.config, _vision_tensors(checkpoint, model), dtype=model.dtype, device=model.device
        )
    except (UnsupportedModel, CorruptCheckpoint) as error:
        if wanted == "on":
            raise InvalidParameter("images", f"cannot be read: {error}") from error
        log.info(f"images     are not read: {error}")
        return None
    per_row = model.hidden_size * (1 + encoder.num_deep) * torch.finfo(model.dtype).bits // 8
    return ModelImages(encoder, processor, per_row, memory)


def _vision_tensors(checkpoint: Checkpoint, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that are not of its text model."""
    part = TextPart(_text_names(checkpoint, model))
    return dequantized((name, tensor) for name, tensor in checkpoint.stored() if not part.has(name))


def _text_names(checkpoint: Checkpoint, model: CausalLM) -> list[str]:
    if is_native(checkpoint.config):
        from chairlift.models.decoder import Decoder
        from chairlift.models.loader import OTHER_EMBEDDING, targets

        assert isinstance(model, Decoder)
        return [OTHER_EMBEDDING, "mtp.layers", *(name for name, _ in targets(model))]
    from chairlift.models.fallback.transformers_classes import checkpoint_tensors

    return [canonical_name(name) for name, _ in checkpoint_tensors(checkpoint.config)]
