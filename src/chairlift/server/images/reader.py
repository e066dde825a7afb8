"""Reads the images of requests: decoded, prepared for the encoder, and as messages to the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter
from chairlift.server.images.urls import SECONDS, AllowedHosts
from chairlift.server.wire.messages import ImageInput
from chairlift.text.images import ChatImages
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from chairlift.vision.processor import ImageProcessor, PreparedImage


@dataclass
class ImageReader:
    """Reads the images of requests to one model. Used from several threads."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @cached_property
    def _processor(self) -> ImageProcessor:
        from chairlift.vision.processor import ImageProcessor  # imports transformers, which takes seconds

        return ImageProcessor(self.folder, self.config, self.tokenizer)

    @property
    def processor(self) -> ImageProcessor:
        with self._lock:
            return self._processor

    def prepare(self, chat: ChatImages, max_tokens: int | None) -> list[PreparedImage]:
        """Decode and prepare the images of a conversation."""
        if not chat.sources:
            return []
        return self.processor.prepare_chat(chat, self._pictures(chat), max_tokens)

    def _pictures(self, chat: ChatImages) -> Iterator[Image]:
        """Decode the images one by one: all of them could take gigabytes at once."""
        from chairlift.vision.reading import data_of_url, decode_image

        left = SECONDS
        for source, location in zip(chat.sources, chat.locations, strict=True):
            if not isinstance(source, str):
                raise InvalidParameter(location, "must have a URL, such as data:image/png;base64,…")
            if source[:5].lower() == "data:":
                data = data_of_url(source, location)
            else:
                begun = time.monotonic()
                data = self.hosts.fetch(source, location, begun + left)
                left -= time.monotonic() - begun
            yield decode_image(data, location)

    def place(self, tokens: Sequence[int], prepared: Sequence[PreparedImage]) -> list[ImageInput]:
        """The images of a prompt as a message has them."""
        if not prepared:
            return []
        return [
            ImageInput(image.digest, list(image.spans), image.work, image.whole, _arrays(image.data))
            for image in self.processor.place(tokens, prepared, "messages")
        ]


def _arrays(data: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in data.items()}


def take_images(
    messages: Sequence[Mapping[str, Any]], reader: ImageReader | None, max_tokens: int | None = None
) -> tuple[list[Any], ChatImages, list[PreparedImage]]:
    """The messages with marks for their images, these, and what was prepared of them: at most `max_tokens`."""
    messages, chat = ChatImages.of(messages)
    if reader is not None:
        return messages, chat, reader.prepare(chat, max_tokens)
    if chat.sources:
        chat.refuse()
    return messages, chat, []
