"""The served model: names, tokenizer, tool format and reasoning format."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chairlift
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.config_file import ConfigCheckpoint
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.recommended_sampling import AUTO, default_sampling
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.options import read_text
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.reasoning_formats.base import ReasoningFormat, choose_reasoning
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import ToolFormat, choose_format


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]  # responses have the first one
    tokenizer: Tokenizer
    tool_format: ToolFormat
    fingerprint: str  # changes with whatever may change the output of a seeded request
    reasoning_format: ReasoningFormat | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters of requests that leave them out
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
        source = engine.get("generation_config", AUTO)
        return cls.create(
            names[0],
            make_tokenizer(checkpoint, chat_template),
            tool_format,
            names[1:],
            reasoning_parser=engine.get("reasoning_parser"),
            embedding=read_embedding_config(checkpoint),
            sampling=default_sampling(checkpoint.path, checkpoint.generation_config, source),
            engine=engine,
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
