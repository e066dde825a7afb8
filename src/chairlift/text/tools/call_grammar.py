"""Grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool import Tool

Marker = Callable[[str], str]  # spells a marker such as <tool_call> in a grammar: as one token, or as its letters

MAX_CALLS = 16  # A weak model may repeat a call until its context is full.

# The white space that chat templates use. Without a limit, a weak model may generate only line breaks.
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def literal(text: str) -> str:
    return json.dumps(text)


def repeated(call: str, separator: str, parallel: bool) -> str:
    """A rule for one call, or for several if `parallel`."""
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def one_of(rules: Iterable[str]) -> str:
    return " | ".join(rules)


@dataclass(frozen=True, slots=True)
class CallStart:
    """One way in which calls begin, and the rest of them."""

    rule: str  # how they begin, in Lark: a marker's token, or text
    pattern: str  # the same as a regular expression, without slashes
    rest: str  # what follows, in Lark

    @property
    def is_token(self) -> bool:
        """Whether they begin with a marker that is a token, which does not occur in text."""
        return self.rule.startswith("<[")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A grammar for one or several calls, alone or after content."""

    starts: Sequence[CallStart]
    rules: Sequence[str]

    @classmethod
    def of_marker(cls, text: str, marker: Marker, rest: str, rules: Sequence[str]) -> CallGrammar:
        """Calls that begin with a marker."""
        return cls([CallStart(marker(text), pattern(text), rest)], rules)

    @property
    def calls(self) -> str:
        return one_of(f"{start.rule} {start.rest}" for start in self.starts)

    def forced(self) -> str:
        """A grammar for calls only."""
        return "\n".join([f"start: {self.calls}", *self.rules])

    def or_json(self, schema: dict[str, Any], header: str = "") -> str:
        """A grammar for calls or for content that is JSON, which may have a header."""
        start = [f"start: {self.calls} | {header} answer", f"answer: {json_value(schema, strict=True)}"]
        return "\n".join([*start, *self.rules])

    def after_content(self, header: str = "") -> str:
        """A grammar for content, which may have a header, or calls, which may follow content without one. Content ends
        where a call begins: from there on, only a complete call is allowed."""
        begins = "|".join(start.pattern for start in self.starts)
        choices, heads = [f"{header} CONTENT?"], []
        for index, start in enumerate(self.starts):
            if start.is_token:
                choices.append(f"{'' if header else 'CONTENT?'} {start.rule} {start.rest}")
            else:
                choices.append(f"head_{index} {start.rest}")
                heads.append(f"head_{index}[lazy]: /(?s:.*){start.pattern}/")
        content = f"CONTENT: /(?s:.+)/ & ~/(?s:.*)({begins})(?s:.*)/"
        return "\n".join([f"start: {one_of(choices)}", content, *heads, *self.rules])


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How calls are written. $name or $quoted_name, $arguments and $number stand for the parts of a call, $space for
    an optional space. The text begins with a marker, unless calls are bare JSON."""

    call: str
    opening: str = ""  # It stands before the first call.
    between: str = ""
    closing: str = ""

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, given by their names and arguments, as a model writes them."""
        written = [
            fill(self.call, name=name, quoted_name=json.dumps(name), arguments=arguments, number=str(number))
            for number, (name, arguments) in enumerate(calls)
        ]
        return fill(self.opening, space="") + self.between.join(written) + self.closing

    def grammar(
        self, tools: Sequence[Tool], rules: Sequence[str], parallel: bool, markers: Sequence[str], marker: Marker
    ) -> CallGrammar:
        """The grammar of one call, or of several if `parallel`. `rules` has `arguments_0`, … for the tools."""
        calls = [
            fill(self.call, name=tool.name, quoted_name=json.dumps(tool.name), arguments=f"$arguments_{index}")
            for index, tool in enumerate(tools)
        ]
        first = next((each for each in markers if (self.opening or self.call).startswith(each)), None)
        if first is None:
            return _bare_calls(calls, tools, rules, self.between if parallel else None)
        between = self.between
        if not self.opening:  # every call begins with the marker
            calls, between = [call.removeprefix(first) for call in calls], between + first
        opening, separator, closing = (
            _spelled(text, markers, marker) for text in (self.opening.removeprefix(first), between, self.closing)
        )
        call = f"call: {one_of(_spelled(call, markers, marker) for call in calls)}"
        rest = f"{opening} {repeated('call', separator, parallel)} {closing}"
        return CallGrammar.of_marker(first, marker, rest, [call, *rules])


def fill(text: str, **parts: str) -> str:
    """Replace $part by the text of each part that is given."""
    return re.sub(r"\$(\w+)", lambda found: parts.get(found[1], found[0]), text)


_PARTS = {"$number": "/[0-9]{1,3}/", "$space": '" "?'}  # other parts are rules
_JSON_TOKENS = re.compile(r'("[\w-]*"|[{}]|: |, )')


def _spelled(text: str, markers: Sequence[str], marker: Marker) -> str:
    """Spell a text of a layout in Lark."""
    return _in_lark(
        re.split("|".join([r"(\$\w+)", *(f"({re.escape(each)})" for each in markers)]), text), markers, marker
    )


def _in_lark(pieces: Iterable[str | None], markers: Sequence[str] = (), marker: Marker = literal) -> str:
    spelled = []
    for piece in filter(None, pieces):
        part = _PARTS.get(piece, piece[1:]) if piece.startswith("$") else literal(piece)
        spelled.append(marker(piece) if piece in markers else part)
    return " ".join(spelled)


def _bare_calls(
    calls: Sequence[str], tools: Sequence[Tool], rules: Sequence[str], separator: str | None
) -> CallGrammar:
    """A grammar for JSON objects without any marker, with or without others after a separator."""
    more = "" if separator is None else f"({literal(separator)} call){{0,{MAX_CALLS - 1}}}"
    starts, objects = [], []
    for call, tool in zip(calls, tools, strict=True):
        begin, name, end = call.partition(json.dumps(tool.name))
        head, tail = _json_tokens(begin + name), _json_tokens(end)
        lenient = r"\s*".join(pattern(token.strip()) for token in head)
        starts.append(CallStart(_in_lark(head), lenient, f"{_in_lark(tail)} {more}"))
        objects.append(_in_lark([*head, *tail]))
    return CallGrammar(starts, [f"call: {one_of(objects)}", *rules])


def _json_tokens(text: str) -> list[str]:
    # Split into the tokens of JSON, so that a call can share a prefix with other allowed JSON.
    return [token for token in _JSON_TOKENS.split(text) if token]


def arguments_rules(tools: Sequence[Tool]) -> list[str]:
    """`arguments_0`, … for the tools' schemas. Each is a separate document, so its internal references work."""
    return [f"arguments_{index}: {json_value(tool.schema, tool.strict)}" for index, tool in enumerate(tools)]


def json_value(schema: dict[str, Any], strict: bool) -> str:
    """A rule for a schema. Unless it is strict, keywords that llguidance cannot enforce are ignored."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": not strict}})


def pattern(text: str) -> str:
    """A regular expression, within slashes, that matches this text."""
    return re.escape(text).replace("/", r"\/")


def marker_speller(tokenizer: Tokenizer) -> Marker:
    """Return the function that spells markers with a tokenizer's tokens."""

    def spell(text: str) -> str:
        token = tokenizer.added_token_id(text)
        return f"<[{token}]>" if token in tokenizer.marker_ids else literal(text)

    return spell
