"""The served model: names, tokenizer, tool format and reasoning format."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chairlift
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.config_file import ConfigCheckpoint
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.recommended_sampling import AUTO, default_sampling
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.machine.hardware import count_gpus
from chairlift.options import read_text
from chairlift.text.chat_template import ChatTemplate
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


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]  # responses have the first one
    tokenizer: Tokenizer
    tool_format: ToolFormat
    fingerprint: str  # changes with whatever may change the output of a seeded request
    reasoning_format: ReasoningFormat | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters of requests that leave them out
    details: ModelDetails = field(default_factory=ModelDetails)
    created: int = field(default_factory=lambda: int(time.time()))

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
        sampling: Mapping[str, float] | None = None,
        engine: Mapping[str, Any] | None = None,
        details: ModelDetails | None = None,
    ) -> ServedModel:
        """Formats that are not given are detected from the chat template. `engine` are the engine's options."""
        template = tokenizer.chat_template or ""
        tools = choose_format(template, tool_format)
        options, defaults = sorted((engine or {}).items()), sorted((sampling or {}).items())
        backend = repr((chairlift.__version__, name, template, options, defaults))
        return cls(
            (name, *aliases),
            tokenizer,
            tools,
            "fp_" + hashlib.sha256(backend.encode("utf-8", "replace")).hexdigest()[:12],
            choose_reasoning(template, reasoning_parser),
            embedding or EmbeddingConfig(),
            sampling or {},
            details or ModelDetails(),
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
    ) -> ServedModel:
        """Load the tokenizer and the settings of a checkpoint; `engine` are the engine's options."""
        checkpoint = ConfigCheckpoint(path) if engine.get("load_format") == "dummy" else open_checkpoint(path)
        source, device = engine.get("generation_config", AUTO), str(engine.get("device", "cpu"))
        on_gpu = device.startswith("cuda") or (device == "auto" and count_gpus() > 0)
        return cls.create(
            names[0],
            make_tokenizer(checkpoint, chat_template),
            tool_format,
            names[1:],
            reasoning_parser=engine.get("reasoning_parser"),
            embedding=read_embedding_config(checkpoint),
            sampling=default_sampling(checkpoint.path, checkpoint.generation_config, source),
            engine=engine,
            details=ModelDetails.of(checkpoint, on_gpu=on_gpu),
        )

    @property
    def name(self) -> str:
        return self.names[0]


def read_chat_template(file: Path | None) -> str | None:
    """Return the template in a file, once it is known to compile."""
    if file is None:
        return None
    source = read_text(file, "chat_template")
    try:
        ChatTemplate(source)
    except UnsupportedModel as error:
        raise InvalidParameter("chat_template", f"cannot use {str(file)!r}: {error}") from None
    return source
