"""The served model: name, tokenizer and tool format."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from chairlift.server.http.errors import APIError
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import ToolFormat, choose_format


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    tool_format: ToolFormat
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def create(cls, name: str, tokenizer: Tokenizer, tool_format: str | None = None) -> ServedModel:
        """Without `tool_format`, the format is detected from the chat template."""
        return cls(name, tokenizer, choose_format(tokenizer.chat_template or "", tool_format))

    def check_name(self, name: str | None) -> None:
        """Raise a 404 error if a request names another model."""
        if name is not None and name != self.name:
            problem = f"the model {name[:200]!r} does not exist; this server has {self.name!r}"
            raise APIError(404, problem, param="model", code="model_not_found")
