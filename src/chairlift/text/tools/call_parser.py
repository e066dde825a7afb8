"""Separates tool calls from content in a model's streamed text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.text.assistant_parts import ArgumentsDelta, AssistantPart, CallBegun, ContentDelta
from chairlift.text.tools.reader import SPACES, NotACall, Reader, Reading, prefix_at_end

if TYPE_CHECKING:
    from chairlift.text.tool_formats.base import ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_ANYTHING = re.compile(r"(?s:.*)")
_LABELS = ("type", "id", "tool_call_id")  # optional string fields of a call


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class CallParser:
    """Finds the calls of a format in a text.

    - A call names one of the request's tools; anything else that looks like a call is content.
    - A call is held back until its name is complete. Then its arguments are passed on as they arrive, even if their
      JSON turns out to be malformed.
    - White space around calls is dropped. No other character is lost.
    """

    def __init__(
        self,
        format_: ToolFormat,
        names: Collection[str],  # perhaps with the schemas of their arguments
        *,
        max_calls: int | None = None,
        forced: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = format_
        self._names = names
        self.schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._max_calls = max_calls  # text after this many calls is dropped
        self._forced = forced  # a grammar allows only calls, so remaining text is a truncated call
        self._new_id = new_id
        self._calls = 0
        self._spaces = ""  # white space: content if more content follows, dropped before a call
        self._in_arguments = False
        self._parts: list[AssistantPart] = []
        self._opening = re.compile("|".join(map(re.escape, format_.openings)))
        self.reader = Reader()
        self._reading = self._read()

    # ---- the AssistantParser interface -----------------------------------------------------------------------------

    def push(self, text: str) -> list[AssistantPart]:
        self.reader.text += text
        next(self._reading, None)
        if self._in_arguments:
            self.emit_arguments(self.reader.take())
        parts, self._parts = self._parts, []
        return parts

    def close(self) -> list[AssistantPart]:
        self.reader.over = True
        parts = self.push("")
        if self._spaces and not self._calls:
            parts.append(ContentDelta(self._spaces))
        return parts

    # ---- the whole text --------------------------------------------------------------------------------------------

    def _read(self) -> Reading[None]:
        try:
            while (yield from self._content()):
                try:
                    yield from self._format.read_calls(self)
                except NotACall:
                    yield from self._recover()
        except _MaxCallsReached:
            while not self.reader.over:
                self.reader.text, self.reader.at = "", 0
                yield

    def _content(self) -> Reading[bool]:
        """Pass content on up to the next opening. Returns False at the end of the text."""
        reader = self.reader
        while True:
            found = self._opening.search(reader.text, reader.at)
            if found:
                reader.at = found.start()
                self._add_content(reader.take())
                return True
            held = 0 if reader.over else max(prefix_at_end(reader.text, opening) for opening in self._format.openings)
            reader.at = len(reader.text) - held
            self._add_content(reader.take())
            if reader.over:
                return False
            yield

    def _recover(self) -> Reading[None]:
        """Continue after malformed text, which is content unless it belongs to the arguments of a call."""
        closing = self._format.closing
        if not self._in_arguments:
            self._add_content(self.reader.take())
        elif closing is None:
            yield from self.reader.run(_ANYTHING)
            self._end_arguments()
        else:
            closed = yield from self.reader.until(closing)
            self._end_arguments()
            if closed and closing not in self._format.openings:
                yield from self.read_end(closing)

    def _add_content(self, text: str) -> None:
        if self._forced:
            return
        stripped = text.rstrip()
        if stripped:
            self._parts.append(ContentDelta(self._spaces + stripped))
            self._spaces = ""
        self._spaces += text[len(stripped) :]

    # ---- for formats -----------------------------------------------------------------------------------------------

    def read_end(self, word: str) -> Reading[None]:
        """Read what stands behind calls."""
        yield from self.reader.run(SPACES)
        yield from self.reader.literal(word)
        self.reader.take()

    def read_list_or_object(self) -> Reading[None]:
        yield from self.reader.run(SPACES)
        if (yield from self.reader.peek()) == "[":
            yield from self.read_list()
        else:
            yield from self.read_object()

    def read_objects(self) -> Reading[None]:
        """One object, or several with ; or , between them."""
        while True:
            yield from self.read_object()
            yield from self.reader.run(SPACES)
            if (yield from self.reader.peek()) not in (";", ","):
                return
            self.reader.at += 1
            yield from self.reader.run(SPACES)

    def read_list(self) -> Reading[None]:
        """[{"name": …}, …]"""
        yield from self.reader.one_of("[")
        while True:
            yield from self.reader.run(SPACES)
            yield from self.read_object()
            yield from self.reader.run(SPACES)
            if (yield from self.reader.one_of(",]")) == "]":
                self.reader.take()
                return

    def read_object(self) -> Reading[None]:
        """{"name": "…", "arguments": {…}}, in any order; the arguments may be missing, or written as a string."""
        yield from self.reader.one_of("{")
        name: str | None = None
        arguments = "{}" if self._format.arguments_optional else None
        begun = False
        while True:
            yield from self.reader.run(SPACES)
            key = yield from self._held_string()
            yield from self.reader.colon()
            if key == self._format.name_key and name is None:
                name = yield from self._held_string()
                self.check_name(name)
            elif key in _ARGUMENTS and not begun:
                if name is not None and (yield from self.reader.peek()) == "{":
                    yield from self.stream_arguments(name)
                    begun = True
                else:
                    arguments = yield from self._held_arguments()
            elif key in _LABELS:
                yield from self._held_string()
            else:
                raise NotACall
            yield from self.reader.run(SPACES)
            if begun and (yield from self.reader.peek()) not in (",", "}"):
                return  # a closing brace is missing, but the arguments are complete
            if (yield from self.reader.one_of(",}")) == "}":
                break
        if not begun:
            if name is None or arguments is None:
                raise NotACall
            self.begin_call(name)
            self.emit_arguments(arguments)
        self.reader.take()

    def check_name(self, name: str) -> None:
        if name not in self._names:
            raise NotACall

    def stream_arguments(self, name: str) -> Reading[None]:
        """Begin a call and pass its arguments on as they arrive."""
        self.begin_call(name)
        self.reader.take()
        self._in_arguments = True
        yield from self.reader.value(repair=True)
        self._end_arguments()

    def translate_arguments(self, name: str, reading: Reading[None]) -> Reading[None]:
        """Begin a call whose arguments `reading` emits as JSON, without the braces around them."""
        self.begin_call(name)
        self.emit_arguments("{")
        self.reader.take()
        try:
            yield from reading
        except NotACall:
            if not self.reader.over:
                self.emit_arguments("}")
            raise
        self.emit_arguments("}")
        self.reader.take()

    def begin_call(self, name: str) -> None:
        if self._calls == self._max_calls:
            raise _MaxCallsReached
        self._spaces = ""
        self._parts.append(CallBegun(self._calls, self._new_id(), name))
        self._calls += 1

    def _end_arguments(self) -> None:
        self.emit_arguments(self.reader.take())
        self._in_arguments = False

    def emit_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ArgumentsDelta(self._calls - 1, text))

    def _held_string(self) -> Reading[str]:
        start = self.reader.at
        yield from self.reader.string()
        return str(_decoded(self.reader.text[start : self.reader.at]))

    def _held_arguments(self) -> Reading[str]:
        """Read arguments that precede the name of their call, or that are an object encoded as a string."""
        start = self.reader.at
        yield from self.reader.value()
        text = self.reader.text[start : self.reader.at]
        value = _decoded(text)
        if isinstance(value, str):
            text, value = value, _decoded(value)
        # UTF-8 cannot encode lone surrogates, which decoded JSON may contain.
        if not isinstance(value, dict) or any("\ud800" <= character <= "\udfff" for character in text):
            raise NotACall
        return text


class _MaxCallsReached(Exception):
    """The text after this point is dropped."""


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None
