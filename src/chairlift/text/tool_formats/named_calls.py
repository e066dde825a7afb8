"""Formats whose calls begin with the name of the function, before the JSON of its arguments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from chairlift.text.reasoning_formats.harmony import CHANNEL, CONSTRAIN, MESSAGE
from chairlift.text.tool_formats.base import TOOL_FORMATS, Call, Message, ToolFormat
from chairlift.text.tool_formats.json_calls import FENCE, FENCE_END, OBJECT
from chairlift.text.tools.call_grammar import CallGrammar, CallLayout, Marker
from chairlift.text.tools.call_parser import CallParser
from chairlift.text.tools.reader import NAME, SPACES, NotACall, Reading
from chairlift.text.tools.tool import Tool


@TOOL_FORMATS.register("mistral")
class MistralFormat(ToolFormat):
    """Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], and since 2025 [TOOL_CALLS]name[ARGS]{…}."""

    order = 20
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings, closing = markers[:1], markers[0]  # a call with malformed arguments ends where the next begins

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.layout = CallLayout(OBJECT, opening="[TOOL_CALLS]$space[", between=", ", closing="]")
        if "[ARGS]" in template:
            self.layout = CallLayout("[TOOL_CALLS]$name[ARGS]$arguments")

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal("[TOOL_CALLS]")
        yield from calls.reader.run(SPACES)
        first = yield from calls.reader.peek()
        if first in ("[", "{"):
            yield from calls.read_list_or_object()
            return
        name = yield from calls.reader.run(NAME)
        calls.check_name(name)
        # Between the name and the arguments: [CALL_ID] and an id in some versions, then [ARGS] in most.
        if (yield from calls.reader.optional("[CALL_ID]")):
            yield from calls.reader.run(NAME)
        yield from calls.reader.optional("[ARGS]")
        yield from calls.reader.run(SPACES)
        if (yield from calls.reader.peek()) != "{":
            raise NotACall
        yield from calls.stream_arguments(name)

    def history(self, messages: list[Message]) -> list[Message]:
        # These templates refuse ids that are not nine letters and digits, as the ids of other servers are.
        return [_with_short_ids(message) for message in messages]


_ID_LENGTH = 9


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [_with_short_id(call, "id") for call in message["tool_calls"]]
    return _with_short_id(changed, "tool_call_id")


def _with_short_id(item: dict[str, Any], key: str) -> dict[str, Any]:
    given = item.get(key)
    if not isinstance(given, str) or (len(given) == _ID_LENGTH and given.isalnum()):
        return item
    return {**item, key: hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]}


@TOOL_FORMATS.register("deepseek")
class DeepSeekFormat(ToolFormat):
    """DeepSeek: <｜tool▁calls▁begin｜> and for each call <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>.

    Before V3.1, a call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>name and the arguments in a ```json block.
    """

    order = 5
    CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    markers = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
    openings, closing = (CALLS, CALL), CALL_END

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.layout = CallLayout(
            f"{self.CALL}$name{self.SEPARATOR}$arguments{self.CALL_END}", opening=self.CALLS, closing=self.CALLS_END
        )
        if FENCE in template:
            fenced = f"$name\n{FENCE}\n$arguments\n{FENCE_END}"
            call = f"{self.CALL}function{self.SEPARATOR}{fenced}{self.CALL_END}"
            self.layout = CallLayout(call, opening=self.CALLS, between="\n", closing=self.CALLS_END)

    def read_calls(self, calls: CallParser) -> Reading[None]:
        before = yield from calls.reader.one_word(self.CALLS, self.CALL)
        while True:
            yield from calls.reader.run(SPACES)
            if before == self.CALLS:
                before = yield from calls.reader.one_word(self.CALL, self.CALLS_END)
            if before == self.CALLS_END:
                calls.reader.take()
                return
            yield from self._read_call(calls)
            before = self.CALLS

    def _read_call(self, calls: CallParser) -> Reading[None]:
        name = yield from calls.reader.run(NAME)
        yield from calls.reader.literal(self.SEPARATOR)
        yield from calls.reader.run(SPACES)
        fenced = (yield from calls.reader.peek()) != "{"
        if fenced:  # the word before was "function"
            name = yield from calls.reader.run(NAME)
            yield from calls.reader.run(SPACES)
            yield from calls.reader.literal(FENCE)
            yield from calls.reader.run(SPACES)
        calls.check_name(name)
        yield from calls.stream_arguments(name)
        yield from calls.reader.run(SPACES)
        if fenced:
            yield from calls.reader.literal(FENCE_END)
        yield from calls.read_end(self.CALL_END)


@TOOL_FORMATS.register("kimi_k2")
class KimiFormat(ToolFormat):
    """Kimi K2: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section."""

    order = 6
    CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
    markers = (CALLS, CALLS_END, CALL, CALL_END, ARGUMENTS)
    openings, closing = (CALLS,), CALL_END
    content_required = True
    layout = CallLayout(
        f"{CALL}functions.$name:$number{ARGUMENTS}$arguments{CALL_END}", opening=CALLS, closing=CALLS_END
    )

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal(self.CALLS)
        while True:
            yield from calls.reader.run(SPACES)
            if (yield from calls.reader.one_word(self.CALL, self.CALLS_END)) == self.CALLS_END:
                calls.reader.take()
                return
            yield from calls.reader.run(SPACES)
            call_id = yield from calls.reader.run(_KIMI_ID)
            name = call_id.removeprefix("functions.").rsplit(":", 1)[0]
            calls.check_name(name)
            yield from calls.reader.run(SPACES)
            yield from calls.reader.literal(self.ARGUMENTS)
            yield from calls.reader.run(SPACES)
            yield from calls.stream_arguments(name)
            yield from calls.read_end(self.CALL_END)

    def history(self, messages: list[Message]) -> list[Message]:
        """Give calls the ids that the templates write into the prompt: functions.name:0, functions.name:1, …"""
        ids: dict[object, str] = {}
        changed = []
        for message in super().history(messages):
            copy = dict(message)
            if "tool_calls" in message:
                calls = []
                for call in message["tool_calls"]:
                    own = f"functions.{call['function']['name']}:{len(ids)}"
                    calls.append({**call, "id": ids.setdefault(call.get("id", own), own)})
                copy["tool_calls"] = calls
            if message.get("tool_call_id") in ids:
                copy["tool_call_id"] = ids[message["tool_call_id"]]
            changed.append(copy)
        return changed


_KIMI_ID = re.compile(r"[a-zA-Z0-9_.:-]*")


@TOOL_FORMATS.register("harmony")
class HarmonyFormat(ToolFormat):
    """gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>, as
    `reasoning_formats/harmony.py` passes it on.

    One call per message, which ends the turn: `parallel` has no effect.
    """

    order = 1
    signs = (CHANNEL, MESSAGE)
    markers = (CHANNEL, MESSAGE, CONSTRAIN)
    openings, closing = (f"{CHANNEL}commentary to=functions.",), "<|call|>"
    single_calls = content_required = True
    layout = CallLayout(f"{openings[0]}$name {CONSTRAIN}json{MESSAGE}$arguments", between=closing)

    def read_calls(self, calls: CallParser) -> Reading[None]:
        yield from calls.reader.literal(self.openings[0])
        name = yield from calls.reader.run(NAME)
        calls.check_name(name)
        if not (yield from calls.reader.until(MESSAGE)):
            raise NotACall
        yield from calls.reader.literal(MESSAGE)
        yield from calls.stream_arguments(name)
        yield from calls.read_end(self.closing)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, marker: Marker) -> CallGrammar:
        return super().grammar(tools, parallel=False, marker=marker)

    def write(self, calls: Sequence[Call]) -> str:
        return super().write(calls) + self.closing

    def history(self, messages: list[Message]) -> list[Message]:
        """Merge content and reasoning of a message with a call: these templates accept one of them."""
        return [
            {**message, "content": "", "thinking": f"{message['thinking']}\n\n{message['content']}"}
            if message.get("tool_calls") and message["content"] and message.get("thinking")
            else message
            for message in super().history(messages)
        ]
