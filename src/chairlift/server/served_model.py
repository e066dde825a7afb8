"""The served model: names, tokenizer, tool format and reasoning format."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import chairlift
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.config_file import ConfigCheckpoint
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.request_defaults import RequestDefaults, read_chat_template
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.machine.hardware import count_gpus
from chairlift.server.images.reader import ImageReader
from chairlift.server.images.urls import AllowedHosts
from chairlift.server.served_adapters import ServedAdapters
from chairlift.text.reasoning_formats.base import ReasoningFormat, choose_reasoning
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import ToolFormat, choose_format


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """What other APIs tell of a model's files."""

    format: str = "safetensors"
    family: str = ""
    quantization: str | None = None
    num_bytes: int = 0
    num_parameters: int | None = None  # None: not known
    config: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint | ConfigCheckpoint, *, on_gpu: bool) -> ModelDetails:
        config, quantization, num_bytes = checkpoint.config, checkpoint.quantization, checkpoint.num_bytes
        count, dtype = None, str(config.get("dtype") or config.get("torch_dtype"))
        if (file := getattr(checkpoint, "file", None)) is not None:
            count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        elif quantization is None and num_bytes and dtype in _DTYPE_BYTES:
            count = num_bytes // _DTYPE_BYTES[dtype]
        family = str(config.get("model_type", ""))
        return cls(checkpoint.format, family, quantization, num_bytes, count, config, on_gpu)


_IMAGE_NAMES = (b'"image"', b'"images"', b'"image_url"', b'"input_image"', b'"image_pil"')
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _reads_images(checkpoint: Checkpoint | ConfigCheckpoint, wanted: str, *, on_gpu: bool) -> bool:
    """Whether images of requests are read. Of a model without any, what knows families is not imported."""
    if not any("vision" in name for name in checkpoint.config):
        return False
    from chairlift.vision.support import image_obstacle

    return image_obstacle(checkpoint.config, checkpoint.format, "cuda" if on_gpu else "cpu", wanted) is None


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]  # responses have the first one
    tokenizer: Tokenizer
    tool_format: ToolFormat
    fingerprint: str  # changes with whatever may change the output of a seeded request
    reasoning_format: ReasoningFormat | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)  # what requests leave out
    details: ModelDetails = field(default_factory=ModelDetails)
    images: ImageReader | None = None  # None: it reads text only
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: ServedAdapters = field(default_factory=ServedAdapters)

    @classmethod
    def create(
        cls,
        name: str,
        tokenizer: Tokenizer,
        tool_format: str | None = None,
        aliases: Sequence[str] = (),
        *,
        reasoning_parser: str | None = None,
        embedding: EmbeddingConfig | None = None,
        defaults: RequestDefaults | None = None,
        engine: Mapping[str, Any] | None = None,
        details: ModelDetails | None = None,
        images: ImageReader | None = None,
    ) -> ServedModel:
        """Formats that are not given are detected from the chat template. `engine` are the engine's options."""
        template = tokenizer.chat_template or ""
        tools = choose_format(template, tool_format)
        options, defaults = sorted((engine or {}).items()), defaults or RequestDefaults()
        backend = repr((chairlift.__version__, name, template, options, defaults))
        return cls(
            (name, *aliases),
            tokenizer,
            tools,
            "fp_" + hashlib.sha256(backend.encode("utf-8", "replace")).hexdigest()[:12],
            choose_reasoning(template, reasoning_parser),
            embedding or EmbeddingConfig(),
            defaults,
            details or ModelDetails(),
            images,
            adapters=ServedAdapters.of(engine or {}),
        )

    @classmethod
    def load(
        cls,
        path: Path,
        names: Sequence[str],
        engine: Mapping[str, Any],
        *,
        tool_format: str | None = None,
        chat_template: str | None = None,
        image_hosts: Sequence[str] = (),
    ) -> ServedModel:
        """Load the tokenizer and the settings of a checkpoint; `engine` are the engine's options, which name the file
        of the chat template if it has not been read."""
        checkpoint = ConfigCheckpoint(path) if engine.get("load_format") == "dummy" else open_checkpoint(path)
        device = str(engine.get("device", "cpu"))
        on_gpu = device.startswith("cuda") or (device == "auto" and count_gpus() > 0)
        tokenizer = make_tokenizer(checkpoint, chat_template or read_chat_template(engine.get("chat_template")))
        images = None
        if _reads_images(checkpoint, str(engine.get("images", "auto")), on_gpu=on_gpu):
            images = ImageReader(checkpoint.path, checkpoint.config, tokenizer, AllowedHosts(image_hosts))
        return cls.create(
            names[0],
            tokenizer,
            tool_format,
            names[1:],
            reasoning_parser=engine.get("reasoning_parser"),
            embedding=read_embedding_config(checkpoint),
            defaults=RequestDefaults.of(checkpoint.path, checkpoint.generation_config, engine),
            engine=engine,
            details=ModelDetails.of(checkpoint, on_gpu=on_gpu),
            images=images,
        )

    def may_read_images(self, body: bytes) -> bool:
        """Whether the JSON of a request may have images that are read; a quote within a text would be escaped."""
        return self.images is not None and any(name in body for name in _IMAGE_NAMES)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters by name of requests that leave them out."""
        return self.defaults.sampling

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that requests may have: those of the model, with each preset, and of adapters."""
        presets = (f"{name}:{preset}" for name in self.names for preset in self.defaults.presets)
        return (*self.names, *presets, *self.adapters.names)

    def named(self, name: str | None) -> ServedModel:
        """The model under the name that a response has: that of an adapter, or its own."""
        return self if self.adapters.get(name) is None else replace(self, names=(str(name), *self.names))

    def defaults_of(self, name: str | None, preset: str | None = None) -> RequestDefaults:
        """What a request leaves out that names this model, a preset of it (`model:preset`) or a preset of its own."""
        if name is None or name in self.names or name not in self.all_names or self.adapters.get(name):
            return self.defaults.preset(preset)
        named = name.rpartition(":")[2]
        if preset not in (None, named):
            raise InvalidParameter("preset", f"is {preset!r:.100}, but the model's name asks for {named!r}")
        return self.defaults.preset(named)
