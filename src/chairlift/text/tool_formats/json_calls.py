"""Formats whose calls are JSON objects: {"name": …, "arguments": …}, bare, tagged or in a list."""

from __future__ import annotations

import re
from typing import Any

from chairlift.text.tool_formats.base import TOOL_FORMATS, ToolFormat
from chairlift.text.tools.call_grammar import CallLayout
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

OBJECT = '{"name": $quoted_name, "arguments": $arguments}'
FENCE, FENCE_END = "```json", "```"
_STRAY_BRACES = re.compile(r"[\s}]*")


@TOOL_FORMATS.register("hermes")
class HermesFormat(ToolFormat):
    """Hermes, Qwen and many others: <tool_call> {"name": …, "arguments": …} </tool_call>."""

    order = 10  # Families with other calls between the same tags come first.
    markers = ("<tool_call>", "</tool_call>")
    openings, closing = markers[:1], markers[1]
    content_required = True
    layout = CallLayout(f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal("<tool_call>")
        yield from calls.reader.run(SPACES)
        yield from calls.read_object()
        yield from calls.reader.run(_STRAY_BRACES)
        calls.reader.take()
        yield from calls.read_end("</tool_call>")


# ---- bare JSON --------------------------------------------------------------------------------------------------


@TOOL_FORMATS.register("json")
class JSONFormat(ToolFormat):
    """{"name": …, "arguments": …}, alone, in lines, in a list or in a code fence, which most models write without
    special training: for unknown templates."""

    order = 1000
    signs = ()
    fallback = True
    openings = (FENCE, "[", "{")
    arguments_optional = False  # only the arguments distinguish {"name": …} from any other JSON
    layout = CallLayout(OBJECT, between="\n")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        fenced = (yield from calls.reader.peek()) == FENCE[0]
        if fenced:
            yield from calls.reader.literal(FENCE)
            yield from calls.reader.run(SPACES)
        if (yield from calls.reader.peek()) == "[":
            yield from calls.read_list()
        else:
            yield from calls.read_objects()
        if fenced:
            yield from calls.read_end(FENCE_END)


@TOOL_FORMATS.register("llama3_json")
class LlamaFormat(ToolFormat):
    """Llama 3: {"name": …, "parameters": …}, perhaps after <|python_tag|>; several calls are separated by
    semicolons."""

    order = 30
    markers = ("<|python_tag|>",)
    openings = (*markers, "{")
    arguments_optional = False
    single_calls = True
    layout = CallLayout('{"name": $quoted_name, "parameters": $arguments}', between="; ")

    @classmethod
    def recognises(cls, template: str) -> bool:
        llama = "<|start_header_id|>" in template and '"parameters"' in template
        return super().recognises(template) or llama

    def read_calls(self, calls: CallParser) -> Reading[None]:
        if (yield from calls.reader.peek()) != "{":
            yield from calls.reader.literal(self.markers[0])
            yield from calls.reader.run(SPACES)
        yield from calls.read_objects()


# ---- JSON in lists ----------------------------------------------------------------------------------------------


@TOOL_FORMATS.register("granite")
class GraniteFormat(ToolFormat):
    """Granite 3: <|tool_call|>[{"name": …, "arguments": …}, …]."""

    order = 60
    markers = ("<|tool_call|>",)
    openings, closing = markers, markers[0]  # a call with malformed arguments ends where the next begins
    content_required = True
    layout = CallLayout(OBJECT, opening="<|tool_call|>[", between=", ", closing="]")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal("<|tool_call|>")
        yield from calls.read_list_or_object()


@TOOL_FORMATS.register("phi4")
class PhiFormat(ToolFormat):
    """Phi-4-mini: <|tool_call|>[{"name": …, "arguments": …}, …]<|/tool_call|>, or functools[…]."""

    order = 50
    markers = ("<|tool_call|>", "<|/tool_call|>")
    openings, closing = (markers[0], "functools["), markers[1]
    layout = CallLayout(OBJECT, opening="<|tool_call|>[", between=", ", closing="]<|/tool_call|>")

    @classmethod
    def recognises(cls, template: str) -> bool:
        return cls.markers[1] in template or "<|/tool|>" in template

    def read_calls(self, calls: CallParser) -> Reading[None]:
        opening = yield from calls.reader.one_word("<|tool_call|>", "functools")
        yield from calls.read_list_or_object()
        if opening != "functools":
            yield from calls.read_end("<|/tool_call|>")


@TOOL_FORMATS.register("cohere")
class CohereFormat(ToolFormat):
    """Command: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": …}, …]<|END_ACTION|>."""

    order = 40
    markers = ("<|START_ACTION|>", "<|END_ACTION|>")
    openings, closing = markers[:1], markers[1]
    name_key = "tool_name"
    content_required = True
    layout = CallLayout(
        '{"tool_call_id": "$number", "tool_name": $quoted_name, "parameters": $arguments}',
        opening="<|START_ACTION|>[\n    ",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
    )

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal("<|START_ACTION|>")
        yield from calls.read_list_or_object()
        yield from calls.read_end("<|END_ACTION|>")

    def shown(self, tool: Tool) -> dict[str, Any]:
        # These templates read the description and the parameters of every tool.
        function = {"description": "", **tool.given["function"], "parameters": tool.schema}
        return {**tool.given, "function": function}
