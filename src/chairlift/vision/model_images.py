"""Starts what a model needs to read images, and says what it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chairlift.core.encoder_cache import EncoderCache
from chairlift.errors import CorruptCheckpoint, InvalidParameter, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.stored_weight import dequantized
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.models.loader import OTHER_EMBEDDING, targets
from chairlift.models.wrappers import TextPart, kind
from chairlift.options import format_bytes
from chairlift.text.tokenizer import Tokenizer
from chairlift.vision.encoder import VisionEncoder, count_weights
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


def check_images(checkpoint: Checkpoint, device: str, wanted: str) -> None:
    """Raise if images cannot be read and the option `images` says that they are."""
    obstacle = image_obstacle(checkpoint.config, checkpoint.format, device, wanted)
    if wanted == "on" and obstacle is not None:
        raise InvalidParameter("images", f"cannot be read: {obstacle}")


def vision_bytes(config: Mapping[str, Any], format: str, device: str, wanted: str, dtype: torch.dtype) -> int:
    """The bytes of the vision part in memory; 0 where images are not read."""
    if image_obstacle(config, format, device, wanted) is not None:
        return 0
    try:
        return count_weights(config) * dtype.itemsize
    except (UnsupportedModel, CorruptCheckpoint):
        return 0  # Loading says what is wrong with it.


@dataclass(frozen=True, slots=True)
class ImagesCheck:
    """What reading images takes, from a config and the files beside it."""

    obstacle: str | None = None  # why they are not read
    weight_bytes: int = 0  # The vision part, in float32.
    tokens_per_megapixel: int | None = None  # None: the files of its processor are not here


def check_reading(config: Mapping[str, Any], folder: Path | None) -> ImagesCheck | None:
    """What reading images on a CPU takes; None for models that read text only. `folder`: the files that are here."""
    if "vision" not in (kind(config) or ""):
        return None
    obstacle = image_obstacle(config, "safetensors", "cpu", "auto")
    if obstacle is not None:
        return ImagesCheck(obstacle)
    try:
        num_bytes, tokens = count_weights(config) * torch.float32.itemsize, None
        if folder is not None and (folder / "tokenizer.json").exists():
            processor = ImageProcessor(folder, config, make_tokenizer(open_checkpoint(folder)))
            tokens, _ = processor.tokens_of(*MEGAPIXEL)
    except (UnsupportedModel, CorruptCheckpoint) as error:
        return ImagesCheck(str(error))
    return ImagesCheck(None, num_bytes, tokens)


def load_images(
    checkpoint: Checkpoint, model: CausalLM, tokenizer: Tokenizer, *, wanted: str, memory: int
) -> ModelImages | None:
    """Load what reads images; None for models that do not, or that cannot here, which the log says."""
    obstacle = image_obstacle(checkpoint.config, checkpoint.format, model.device.type, wanted)
    if obstacle is not None:
        if wanted != "off" and "vision" in (kind(checkpoint.config) or ""):
            log.info(f"images     are not read: {obstacle}")
        return None
    try:
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
    assert isinstance(model, Decoder)
    part = TextPart([OTHER_EMBEDDING, "mtp.layers", *(name for name, _ in targets(model))])
    return dequantized((name, tensor) for name, tensor in checkpoint.stored() if not part.has(name))
