"""Llama 3: {"name": …, "parameters": …} as bare JSON, perhaps after <|python_tag|>."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat
from chairlift.text.tools.call_grammar import CallGrammar, Marker, bare_objects, call_object
from chairlift.text.tools.call_parser import BareJSONParser
from chairlift.text.tools.reader import SPACES, Reading
from chairlift.text.tools.tool import Tool

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(BareJSONParser):
    openings = (PYTHON_TAG, "{")

    def read_calls(self) -> Reading[None]:
        if (yield from self.reader.peek()) != "{":
            yield from self.reader.literal(PYTHON_TAG)
            yield from self.reader.run(SPACES)
        yield from self.read_objects()


@TOOL_FORMATS.register("llama3_json")
class LlamaFormat(ToolFormat):
    """{"name": …, "parameters": …}; several calls are separated by semicolons."""

    order = 30
    parser = LlamaParser
    markers = (PYTHON_TAG,)

    @staticmethod
    def recognises(template: str) -> bool:
        llama = "<|start_header_id|>" in template and '"parameters"' in template
        return PYTHON_TAG in template or llama

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        return bare_objects(tools, "parameters", "; ", parallel)

    def history(self, messages: list[Message]) -> list[Message]:
        return one_call_at_a_time(messages)  # these templates refuse several calls in one message

    def write(self, calls: Sequence[Call]) -> str:
        return "; ".join(call_object(*call, "parameters") for call in calls)


def one_call_at_a_time(messages: list[Message]) -> list[Message]:
    """Turn a message with several calls into a call and its result, the next call and its result, and so on."""
    split: list[Message] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results and split and len(split[-1].get("tool_calls", [])) > 1:
            split += _paired(split.pop(), list(group))
        else:
            split += group
    return split


def _paired(message: Message, results: list[Message]) -> list[Message]:
    pairs: list[Message] = []
    for call in message["tool_calls"]:
        its_results = [result for result in results if result.get("tool_call_id") == call.get("id")]
        texts = {"role": message["role"], "content": None} if pairs else message  # only the first one has texts
        pairs += [{**texts, "tool_calls": [call]}, *its_results]
    return pairs + [result for result in results if result not in pairs]
