"""The interface of a tool-call format, and the choice of the format for a chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, ClassVar

from chairlift.registry import Registry
from chairlift.text.tools.call_grammar import CallGrammar, CallLayout, Marker, arguments_rules
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import Reading
from chairlift.text.tools.tool import Tool

Message = dict[str, Any]
Call = tuple[str, str]  # (function name, arguments as JSON)


class ToolFormat(ABC):
    """The tool-call format of one model family: how its calls are recognised, read and written."""

    order: ClassVar[int] = 100  # the lowest one that recognises a template is chosen
    signs: ClassVar[tuple[str, ...] | None] = None  # templates of the family contain all of them; None: the 1st marker
    fallback: ClassVar[bool] = False  # whether it recognises templates that it does not know
    markers: ClassVar[tuple[str, ...]] = ()  # kept in the text even if they are special tokens
    layout: CallLayout

    openings: ClassVar[tuple[str, ...]]  # texts with which calls begin
    closing: ClassVar[str | None] = None  # text that ends a call even if its arguments are malformed
    name_key: ClassVar[str] = "name"
    arguments_optional: ClassVar[bool] = True
    verbatim: ClassVar[bool] = True  # whether the arguments are passed on as the model writes them

    single_calls: ClassVar[bool] = False  # whether templates refuse several calls in one message
    content_required: ClassVar[bool] = False  # whether templates read the content of messages that have only calls

    def __init__(self, template: str) -> None:
        self.template = template

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template belongs to this family."""
        return all(sign in template for sign in (cls.markers[:1] if cls.signs is None else cls.signs))

    def parser(self, names: Collection[str], **options: Any) -> CallParser:
        """Create a parser for one completion's text, with the options of `CallParser`."""
        return CallParser(self, names, **options)

    @abstractmethod
    def read_calls(self, calls: CallParser) -> Reading[None]:
        """Read calls from an opening up to where content may begin; raises NotACall for other text."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        """Return a grammar for one call of one of the tools, or for several if `parallel`."""
        return self.layout.grammar(tools, self.arguments_rules(tools), parallel, self.markers, marker)

    def arguments_rules(self, tools: Sequence[Tool]) -> list[str]:
        """Return the rules `arguments_0`, … for the arguments of each tool."""
        return arguments_rules(tools)

    def write(self, calls: Sequence[Call]) -> str:
        """Return these calls as a model of this family writes them."""
        return self.layout.write((name, self.written_arguments(arguments)) for name, arguments in calls)

    def written_arguments(self, arguments: str) -> str:
        return arguments

    def shown(self, tool: Tool) -> dict[str, Any]:
        """Return a tool in the form that this family's templates require."""
        return tool.given

    def history(self, messages: list[Message]) -> list[Message]:
        """Convert validated messages to the form that this family's templates require."""
        if self.single_calls:
            messages = one_call_at_a_time(messages)
        if self.content_required:
            messages = [{**message, "content": message["content"] or ""} for message in messages]
        return messages


TOOL_FORMATS: Registry[type[ToolFormat]] = Registry("tool_format", "chairlift.text.tool_formats", grouped=True)
DEFAULT_FORMAT = "hermes"  # the most widespread


def choose_format(template: str, name: str | None = None) -> ToolFormat:
    """Return the format called `name`, or the one recognised from the chat template. For a template that neither has a
    known format nor shows tools, `tools/tool_use.py` describes the default one in the prompt."""
    if name is not None:
        return TOOL_FORMATS.get(name)(template)
    formats = sorted(map(TOOL_FORMATS.get, TOOL_FORMATS.names()), key=lambda format_: format_.order)
    found = next(format_ for format_ in formats if format_.recognises(template))
    return (TOOL_FORMATS.get(DEFAULT_FORMAT) if found.fallback and "tools" not in template else found)(template)


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
