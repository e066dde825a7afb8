"""Prepares images for an encoder and puts their placeholders into prompts, by the processors of transformers."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.core.images import PromptImage
from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter, UnsupportedModel
from chairlift.text.images import ChatImages
from chairlift.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 64  # The limit of one prompt.
MAX_PIXELS_IN_ALL = 100_000_000  # What an encoder reads of them takes up to 24 bytes each.


@dataclass(frozen=True, slots=True)
class PromptWithImages:
    """The tokens of a prompt, with as many placeholders as its images have embeddings."""

    tokens: list[int]
    images: tuple[PromptImage, ...]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as an encoder reads it."""

    digest: bytes
    data: dict[str, np.ndarray]
    replacement: str  # what a prompt has in its place


class ImageProcessor:
    """Prepares the images of one model. Used from several threads."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Raises UnsupportedModel if transformers has no processor for the checkpoint."""
        self._processor = _make_processor(folder, config)
        self._tokenizer = tokenizer
        self._accepted = _accepted_inputs(config)
        self._patch = _patch_size(config)
        self.marker: str = self._processor.image_token
        self.token_id = _image_token_id(config)
        self._placeholder: str = self._processor.tokenizer.convert_ids_to_tokens(self.token_id)
        self.whole = sees_whole_images(config)
        self._options = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs,
        )["images_kwargs"]

    def prepare(self, text: str, images: Sequence[Image], parameter: str = "images") -> PromptWithImages:
        """The prompt `text`, which has a marker for each image, with these images."""
        count = text.count(self.marker)
        if count != len(images):
            raise InvalidParameter(
                parameter, f"the prompt has {count} markers {self.marker!r} for {len(images)} images"
            )
        names = [f"{parameter}[{i}]" for i in range(count)]
        prepared = self._prepare_all(images, names)
        pieces, replacements = text.split(self.marker), [each.replacement for each in prepared]
        text = pieces[0] + "".join(own + piece for own, piece in zip(replacements, pieces[1:], strict=True))
        tokens = self._tokenizer.encode(text)
        return PromptWithImages(tokens, self.place(tokens, prepared, parameter))

    def prepare_chat(
        self, chat: ChatImages, pictures: Iterable[Image], max_tokens: int | None = None
    ) -> list[PreparedImage]:
        """Prepare the pictures of a conversation, which are read one by one and have at most `max_tokens`, and tell its
        template's reader what to write for each."""
        prepared = self._prepare_all(pictures, chat.locations, max_tokens)
        chat.marker, chat.replacements = self.marker, [each.replacement for each in prepared]
        return prepared

    def _prepare_all(
        self, images: Iterable[Image], parameters: Sequence[str], max_tokens: int | None = None
    ) -> list[PreparedImage]:
        """What an encoder reads of the images of one prompt."""
        count, pixels, tokens, prepared = len(parameters), 0, 0, list[PreparedImage]()
        if count > MAX_IMAGES:
            raise InvalidParameter(parameters[MAX_IMAGES], f"is one of {count} images; the limit is {MAX_IMAGES}")
        for image, name in zip(images, parameters, strict=True):
            pixels += image.width * image.height
            if pixels > MAX_PIXELS_IN_ALL:
                problem = f"is one too many: the images of a request may have {MAX_PIXELS_IN_ALL:,} pixels in all"
                raise InvalidParameter(name, problem)
            prepared.append(self._prepare(image, count, name))
            tokens += prepared[-1].replacement.count(self._placeholder)
            if max_tokens is not None and tokens > max_tokens:
                problem = f"is one too many: the images so far have {tokens:,} tokens; the limit is {max_tokens:,}"
                raise InvalidParameter(name, problem, CONTEXT_LENGTH_EXCEEDED)
        return prepared

    def place(
        self, tokens: Sequence[int], prepared: Sequence[PreparedImage], parameter: str
    ) -> tuple[PromptImage, ...]:
        """The images with the places of their embeddings in a prompt."""
        if not prepared:
            return ()
        places = np.flatnonzero(np.array(tokens) == self.token_id)
        counts = [each.replacement.count(self._placeholder) for each in prepared]
        if sum(counts) != len(places):
            problem = f"the prompt has {len(places)} placeholders for {sum(counts)} embeddings of its images"
            raise InvalidParameter(parameter, f"{problem}: its chat template must write {self.marker!r} for each image")
        owned = np.split(places, np.cumsum(counts)[:-1])
        return tuple(
            PromptImage(each.digest, _runs(own), self._work(each.data), self.whole, each.data)
            for each, own in zip(prepared, owned, strict=True)
        )

    def _prepare(self, image: Image, count: int, parameter: str) -> PreparedImage:
        """What the encoder reads of one of `count` images, and the text that stands for it."""
        try:
            data, replacements = self._processor._process_images([image], **self._options)
            replacement = replacements[0]
            if count > 1 and "batch_num_images" in data:  # One of several in a prompt is not divided into tiles.
                data, replacements = self._processor._process_images([[image, image]], **self._options)
                replacement = replacements[0]
                data = {name: value[:1] for name, value in data.items()} | {"batch_num_images": [count]}
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise InvalidParameter(parameter, f"cannot be prepared: {error}") from error
        arrays = {name: _array(value) for name, value in data.items() if name in self._accepted}
        return PreparedImage(_digest(image, count if "batch_num_images" in data else 1), arrays, replacement)

    def _work(self, data: Mapping[str, np.ndarray]) -> int:
        """The patches that the encoder computes."""
        pixels = data["pixel_values"]
        if pixels.ndim <= 3:  # patches already
            return max(1, int(np.prod(pixels.shape[:-1])))
        pictures, (height, width) = int(np.prod(pixels.shape[:-3])), pixels.shape[-2:]
        return max(1, pictures * int(height) * int(width) // self._patch**2)

    def tokens_of(self, width: int, height: int) -> tuple[int, int]:
        """How many placeholders, and how many patches, a picture of this size has."""
        from PIL import Image

        prepared = self._prepare(Image.new("RGB", (width, height)), 1, "image")
        return prepared.replacement.count(self._placeholder), self._work(prepared.data)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, list | tuple):
        value = np.stack([np.asarray(each) for each in value])
    array = np.ascontiguousarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _digest(image: Image, count: int) -> bytes:
    """The same for pictures that are the same to an encoder."""
    start = f"{image.mode} {image.size} {count} ".encode()
    return hashlib.sha256(start + image.tobytes()).digest()


def _runs(places: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ascending positions as runs [start, end)."""
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks))


def _make_processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """The processor of transformers, without its parts for videos and sound."""
    from transformers import AutoImageProcessor, AutoTokenizer

    processor_class = _processor_class(str(config.get("model_type")))
    try:
        image_processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UnsupportedModel(f"its image processor cannot be read: {error}") from error
    parameters = inspect.signature(processor_class.__init__).parameters
    options = {key: value for key, value in settings.items() if key in parameters and key not in _PARTS}
    # The class checks the types of parts that it is made without here, and those of some need further libraries.
    lenient = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _accept})
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    parts |= {name: None for name in _PARTS if name in parameters and name not in parts}
    try:
        return lenient(**parts, **options)
    except Exception as error:  # the constructors of a hundred classes
        raise UnsupportedModel(f"its processor cannot be made: {error!r}") from error


def _processor_class(model_type: str) -> Any:
    """The class in its own module: the package offers some classes only beside libraries for videos."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, model_type_to_module_name

    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    owners = [each for each, own in PROCESSOR_MAPPING_NAMES.items() if name is not None and own == name]
    for owner in dict.fromkeys(map(model_type_to_module_name, owners)):
        module = _processing_module(f"transformers.models.{owner}", owner)
        if module is not None and hasattr(module, str(name)):
            if getattr(module, "num2words", str) is None:
                module.num2words = str  # type: ignore[attr-defined]  # It writes the lengths of videos only.
            return getattr(module, str(name))
    raise UnsupportedModel(f"transformers has no processor for {model_type!r}")


def _processing_module(package: str, owner: str) -> ModuleType | None:
    """The module of a processor. Some take a function from their image processor for torchvision, which is also in the
    one for Pillow: that stands in for it where torchvision is not installed."""
    for _ in range(2):
        try:
            return importlib.import_module(f"{package}.processing_{owner}")
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                return None
            with_pillow = importlib.import_module(f"{package}.image_processing_pil_{owner}")
            sys.modules[f"{package}.image_processing_{owner}"] = with_pillow
        except ImportError:
            return None
    return None


_PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "audio_processor", "chat_template")


def _accept(self: Any, name: str, part: Any) -> None:
    """Accept any part of a processor."""


def _accepted_inputs(config: Mapping[str, Any]) -> set[str]:
    """The inputs of the model's encoder, by name."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[str(config["model_type"])]]
    return set(inspect.signature(whole.get_image_features).parameters)


def _image_token_id(config: Mapping[str, Any]) -> int:
    from chairlift.vision.encoder import whole_config

    whole = whole_config(config)
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
    token_id = next((getattr(whole, name) for name in names if getattr(whole, name, None) is not None), None)
    if token_id is None:
        raise UnsupportedModel("config.json names no token that stands for images")
    return int(token_id)


def _patch_size(config: Mapping[str, Any]) -> int:
    size = (config.get("vision_config") or {}).get("patch_size") or 14
    return int(size[0] if isinstance(size, list) else size)


def sees_whole_images(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of an image see those behind them in the same image."""
    return str(config.get("model_type")) == "gemma3"
