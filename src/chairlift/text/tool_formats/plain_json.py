"""Calls as bare JSON: what Llama 3 writes, and what most models write if nobody taught them anything else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from chairlift.text.tool_formats.base import Call, Message, ToolFormat
from chairlift.text.tools.call_grammar import Marker, call_object, call_objects, literal, repeated
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

PYTHON_TAG = "<|python_tag|>"
_FENCE, _FENCE_END = "```json", "```"


class _BareParser(CallParser):
    arguments_optional = False  # nothing else tells {"name": …} from any other JSON

    def read_objects(self) -> Reading[None]:
        """One object, or several with ; or , between them."""
        while True:
            yield from self.read_object()
            yield from self.reader.run(SPACES)
            if (yield from self.reader.peek()) not in (";", ","):
                return
            self.reader.at += 1
            yield from self.reader.run(SPACES)


class LlamaParser(_BareParser):
    openings = (PYTHON_TAG, "{")

    def read_calls(self) -> Reading[None]:
        if (yield from self.reader.peek()) != "{":
            yield from self.reader.literal(PYTHON_TAG)
            yield from self.reader.run(SPACES)
        yield from self.read_objects()


class JSONParser(_BareParser):
    openings = (_FENCE, "[", "{")

    def read_calls(self) -> Reading[None]:
        fenced = (yield from self.reader.peek()) == _FENCE[0]
        if fenced:
            yield from self.reader.literal(_FENCE)
            yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_objects()
        if fenced:
            yield from self.reader.run(SPACES)
            yield from self.reader.literal(_FENCE_END)
            self.reader.take()


class LlamaFormat(ToolFormat):
    """{"name": …, "parameters": …}, several separated by semicolons, perhaps after <|python_tag|>."""

    name = "llama3_json"
    parser = LlamaParser
    markers = (PYTHON_TAG,)

    @staticmethod
    def wrote(template: str) -> bool:
        llama = "<|start_header_id|>" in template and '"parameters"' in template
        return PYTHON_TAG in template or llama

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> str:
        start = f"start: {repeated('object', literal('; '), parallel)}"
        return "\n".join([start, *call_objects(tools, "parameters")])

    def history(self, messages: list[Message]) -> list[Message]:
        return _one_call_at_a_time(messages)  # these templates refuse more

    def write(self, calls: Sequence[Call]) -> str:
        return "; ".join(call_object(*call, "parameters") for call in calls)


def _one_call_at_a_time(messages: list[Message]) -> list[Message]:
    """An answer with several calls becomes a call and its result, the next call and its result, and so on."""
    told: list[Message] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results and told and len(told[-1].get("tool_calls", [])) > 1:
            told += _paired(told.pop(), list(group))
        else:
            told += group
    return told


def _paired(message: Message, results: list[Message]) -> list[Message]:
    pairs: list[Message] = []
    for call in message["tool_calls"]:
        content = None if pairs else message["content"]
        its_results = [result for result in results if result.get("tool_call_id") == call.get("id")]
        pairs += [{**message, "content": content, "tool_calls": [call]}, *its_results]
    return pairs + [result for result in results if result not in pairs]


class JSONFormat(ToolFormat):
    """{"name": …, "arguments": …}, alone, in lines, in a list or in a fence: for templates of no known family."""

    name = "json"
    parser = JSONParser

    @staticmethod
    def wrote(template: str) -> bool:
        return True

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> str:
        line = literal("\n")
        start = f"start: {repeated('object', line, parallel)}"
        return "\n".join([start, *call_objects(tools, "arguments")])

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(call_object(*call, "arguments") for call in calls)
