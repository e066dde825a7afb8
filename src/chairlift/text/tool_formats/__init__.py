"""The formats in which models write tool calls, and which of them a chat template speaks."""

from __future__ import annotations

from chairlift.errors import InvalidParameter
from chairlift.text.tool_formats.base import ToolFormat
from chairlift.text.tool_formats.hermes import HermesFormat
from chairlift.text.tool_formats.mistral import MistralFormat
from chairlift.text.tool_formats.plain_json import JSONFormat, LlamaFormat

__all__ = ["FORMATS", "ToolFormat", "choose_format"]

# The first that recognises a template is taken; the last takes any.
_IN_ORDER: tuple[type[ToolFormat], ...] = (HermesFormat, MistralFormat, LlamaFormat, JSONFormat)
FORMATS = {format_.name: format_ for format_ in _IN_ORDER}


def choose_format(template: str, name: str | None = None) -> ToolFormat:
    """The format called `name`, or the one that the chat template's text shows."""
    if name is not None:
        if name not in FORMATS:
            raise InvalidParameter("tool_format", f"must be one of {', '.join(FORMATS)}, got {name!r}")
        return FORMATS[name](template)
    if "tools" not in template:
        return HermesFormat(template)  # the most widespread; the model is told about it, see `described`
    return next(format_ for format_ in _IN_ORDER if format_.wrote(template))(template)
