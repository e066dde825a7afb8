"""The input of /v1/responses, a list of items: its translation to chat messages, and the items as they are kept."""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Literal

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Entries, StrictModel, parse_at
from chairlift.server.responses.tools import ADDITIONAL_TOOLS, OfferedTools, check_encodable, custom_arguments
from chairlift.server.wire.unknown_fields import ignore
from chairlift.text.images import image_mark

Item = dict[str, Any]

COMPACTION = "compaction"
SUMMARY_TITLE = "Summary of the conversation so far:"
VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SUMMARY = "chairlift-summary-1:"  # What `encoded_summary` returns begins so.


@dataclass(frozen=True, slots=True)
class Earlier:
    """The items before the input, which this server has kept."""

    items: Sequence[Item] = ()
    parameter: str = "previous_response_id"  # It names them in the request.
    size: int = 0  # bytes of all


NOTHING = Earlier()


def encoded_summary(text: str) -> str:
    """Return the content of a compaction item. Its summary can be read by its client, whose conversation it is."""
    return _SUMMARY + base64.b64encode(text.encode()).decode()


def decoded_summary(parameter: str, content: str) -> str:
    try:
        if content.startswith(_SUMMARY):
            return base64.b64decode(content.removeprefix(_SUMMARY), validate=True).decode()
    except ValueError:
        pass
    problem = "what another server has compacted cannot be read here; send the items that it stands for"
    raise InvalidParameter(parameter, problem)


_REFUSED_PARTS = {
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
}
_REFUSED_ITEMS = {
    "item_reference": "this server keeps no items, so send the item itself (clients do so with store: false)",
    "compaction_trigger": "this server does not compact conversations; send the input that the model should see",
}
# Calls of tools that run in a server, which an earlier server has answered. They are left out, and that is said.
_LEFT_OUT_ITEMS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output"),
        *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "program", "program_output"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    )
)


class _Item(StrictModel):
    """Fields of every item. Ids and statuses, which clients send back from earlier responses, are ignored."""

    prefix: ClassVar[str] = "item"  # Ids of such items begin so.

    type: str | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def kept(self) -> Item:
        """Return the item in the form of a list of items, but without its id."""
        return {"type": self.type, "status": self.status or "completed"}


class _Message(_Item):
    prefix = "msg"

    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    phase: Literal["commentary", "final_answer"] | None = None

    def kept(self) -> Item:
        is_output = self.role == "assistant"
        content = [_kept_part(part, is_output=is_output) for part in _parts(self.content)]
        phase = {} if self.phase is None else {"phase": self.phase}
        return _Item.kept(self) | {"type": "message", "role": self.role, "content": content} | phase


class _ToolCall(_Item):
    prefix = "fc"

    call_id: str
    name: str
    namespace: str | None = None
    caller: Any = None  # Nothing but the model calls tools here.

    def kept(self) -> Item:
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return _Item.kept(self) | {"call_id": self.call_id, "name": self.name} | namespace


class _FunctionCall(_ToolCall):
    arguments: str

    @property
    def chat_arguments(self) -> str:
        return self.arguments

    def kept(self) -> Item:
        return super().kept() | {"arguments": self.arguments}


class _CustomToolCall(_ToolCall):
    input: str

    @property
    def chat_arguments(self) -> str:
        return custom_arguments(self.input)

    def kept(self) -> Item:
        return super().kept() | {"input": self.input}


class _ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _CallOutput(_Item):
    prefix = "fco"

    call_id: str
    output: Any
    name: str | None = None
    namespace: str | None = None
    caller: Any = None

    def kept(self) -> Item:
        output = self.output
        if not isinstance(output, str):
            output = [_kept_part(part, is_output=False) for part in output]
        return _Item.kept(self) | {"call_id": self.call_id, "output": output}


class _AdditionalTools(_Item):
    """Further tools, which `ResponsesRequest.offered_tools` reads."""

    prefix = "at"

    role: Literal["developer"] | None = None
    tools: Entries[dict[str, Any]]

    def kept(self) -> Item:
        return {"type": self.type, "role": "developer", "tools": self.tools}


class _Reasoning(_Item):
    """Reasoning of an earlier response. A summary is read if there is no text; encrypted content cannot be read."""

    prefix = "rs"

    content: Entries[_ReasoningPart] | None = None
    summary: Entries[_ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or [])

    def kept(self) -> Item:
        parts = {"summary": self.summary or [], "content": self.content or []}
        texts = {name: [{"type": part.type, "text": part.text} for part in found] for name, found in parts.items()}
        return _Item.kept(self) | texts


class _Compaction(_Item):
    """The summary of a conversation, by which an earlier request has replaced its items."""

    prefix = "cmp"

    encrypted_content: str

    def kept(self) -> Item:
        return {"type": self.type, "encrypted_content": self.encrypted_content}


class _TextPart(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # added by the official client


class _ImagePart(StrictModel):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: None = None
    detail: str | None = None


class _RefusalPart(StrictModel):
    type: Literal["refusal"]
    refusal: str


_KINDS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _CallOutput,
    "custom_tool_call": _CustomToolCall,
    "custom_tool_call_output": _CallOutput,
    "reasoning": _Reasoning,
    COMPACTION: _Compaction,
    ADDITIONAL_TOOLS: _AdditionalTools,
}
_PARTS = ("input_text", "input_image", *_REFUSED_PARTS)  # A user's message has these parts, which may also stand alone.


class InputMessages:
    """Chat messages and the location of each in the request; and the items of the input, as they are kept."""

    def __init__(
        self,
        given: str | list[Item],
        instructions: str | None = None,
        tools: OfferedTools | None = None,
        earlier: Earlier = NOTHING,
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._locations: list[list[str]] = []  # They are those of a message, then of its tool calls.
        self._tools = tools or OfferedTools()
        self._call_ids: set[str] = set()
        self._reasoning = ""  # It belongs to the assistant message that follows.
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        for item in earlier.items:
            self._add_item(earlier.parameter, item)
        self.items = read_items(given)
        for location, item in self.items:
            self._add_item(location, item)

    @property
    def kept_items(self) -> list[Item]:
        """The items of the input, each with an id of its own."""
        return with_ids(self.items)

    def cuts(self) -> list[int]:
        """Return the indices of the messages from which a shortened conversation may begin, ascending: those of the
        user, then those of the assistant after the last one."""
        roles = [message["role"] for message in self.messages]
        users = [index for index, role in enumerate(roles) if role == "user"]
        last = users[-1] if users else -1
        return users[1:] + [index for index in range(last + 1, len(roles)) if roles[index] == "assistant"]

    def kept(self, cut: int) -> list[dict[str, Any]]:
        """Return the messages from the index `cut`, and the instructions in front of all."""
        return self.messages[: self._first] + self.messages[max(cut, self._first) :]

    def drop_before(self, cut: int) -> None:
        """Drop the messages before the index `cut`, except the instructions in front."""
        self.messages = self.kept(cut)
        self._locations[self._first : cut] = []

    @property
    def _first(self) -> int:
        """The number of messages that are never dropped."""
        return 1 if self.messages and self.messages[0]["role"] == "system" else 0

    def location(self, parameter: str) -> str:
        """Return the location in the input of `messages[2].tool_calls[0]…`; other names are returned unchanged."""
        found = re.fullmatch(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function)?(.*)", parameter, re.DOTALL)
        if found is None:
            return parameter
        message, call, rest = found.groups()
        return self._locations[int(message)][0 if call is None else 1 + int(call)] + rest

    def _add_item(self, location: str, item: Item) -> None:
        match parse_item(location, item):
            case _Message(role=role, content=content):
                # Chat templates have no role "developer".
                role = "system" if role == "developer" else role
                message = {"role": role, "content": _text(f"{location}.content", content)}
                self._add(location, message | self._take_reasoning(role))
            case _Reasoning(text=text):
                self._reasoning = "\n\n".join(filter(None, (self._reasoning, text)))
            case _FunctionCall() | _CustomToolCall() as call:
                self._add_call(location, call)
            case _CallOutput(call_id=call_id, output=output):
                if call_id not in self._call_ids:
                    raise InvalidParameter(f"{location}.call_id", "has no call before it in input")
                text = _text(f"{location}.output", output)
                self._add(location, {"role": "tool", "tool_call_id": call_id, "content": text})
            case _Compaction(encrypted_content=content):
                self._add_summary(location, decoded_summary(f"{location}.encrypted_content", content))

    def _add_summary(self, location: str, summary: str) -> None:
        """Add the summary of a conversation behind what its user has said, which becomes one message: few templates
        accept several of one role."""
        while [message["role"] for message in self.messages[-2:]] == ["user", "user"]:
            last = self.messages.pop()
            self.messages[-1]["content"] += "\n\n" + last["content"]
            self._locations.pop()
        self._add(location, {"role": "assistant", "content": f"{SUMMARY_TITLE}\n\n{summary}"})

    def _add(self, location: str, message: dict[str, Any]) -> None:
        """Append a message. Leading system messages are merged, since few templates accept more than one."""
        if message["role"] == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + message["content"]
            return
        self.messages.append(message)
        self._locations.append([location])

    def _take_reasoning(self, role: str) -> dict[str, str]:
        """Return the field for reasoning items before an assistant message, which belong to it."""
        if role != "assistant" or not self._reasoning:
            return {}
        reasoning, self._reasoning = self._reasoning, ""
        return {"reasoning_content": reasoning}

    def _add_call(self, location: str, call: _FunctionCall | _CustomToolCall) -> None:
        """Add a call to the assistant message before it, since both are one turn of the model."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add(location, {"role": "assistant", "content": "", **self._take_reasoning("assistant")})
        name = self._tools.shown_name(call.namespace, call.name)
        function = {"name": name, "arguments": call.chat_arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})
        self._locations[-1].append(location)
        self._call_ids.add(call.call_id)


def read_items(given: str | list[Item]) -> list[tuple[str, Item]]:
    """Return the items of an input with their locations in the request. A text, and parts without a message, are a
    message of the user; calls of tools that a server runs are left out."""
    if isinstance(given, str):
        return [("input", {"type": "message", "role": "user", "content": given})]
    found: list[tuple[str, Item]] = []
    for are_parts, group in groupby(enumerate(given), lambda one: one[1].get("type") in _PARTS):
        items = [(f"input[{index}]", item) for index, item in group]
        if are_parts:
            text = "\n".join(_part(location, part) for location, part in items)
            found.append((items[0][0], {"type": "message", "role": "user", "content": text}))
            continue
        for location, item in items:
            kind = item.get("type")
            if isinstance(kind, str) and kind in _LEFT_OUT_ITEMS:
                ignore(f"{location}.{kind}", "this server runs no tools itself")
            else:
                found.append((location, item))
    return found


def with_ids(given: Iterable[tuple[str, Item]]) -> list[Item]:
    """Return valid items as they are kept. They have the ids that they were given, unless an item before has it."""
    items: list[Item] = []
    ids: set[str] = set()
    for location, each in given:
        item = parse_item(location, each)
        item_id = item.id
        if item_id is None or item_id in ids or not VALID_ID.fullmatch(item_id):
            item_id = f"{item.prefix}_{uuid.uuid4().hex}"
        ids.add(item_id)
        items.append({"id": item_id, **item.kept()})
        check_encodable(location, items[-1])
    return items


def checked_items(given: list[Item]) -> list[Item]:
    """Return the items that are added to a conversation, as they are kept; raise for one that no request can use."""
    items = read_items(given)
    for location, each in items:
        match parse_item(location, each):
            case _Message(content=content):
                _text(f"{location}.content", content)
            case _CallOutput(output=output):
                _text(f"{location}.output", output)
            case _Compaction(encrypted_content=content):
                decoded_summary(f"{location}.encrypted_content", content)
    return with_ids(items)


def parse_item(location: str, given: Item) -> _Item:
    kind = given.get("type")
    if kind is None and "role" in given:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = f"must be one of {', '.join(_KINDS)}, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"{location}.type", _REFUSED_ITEMS.get(str(kind), known))
    return parse_at(location, _KINDS[kind], given)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "output_text", "text": content}] if isinstance(content, str) else content


def _kept_part(part: dict[str, Any], *, is_output: bool) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "input_image", "image_url": part.get("image_url"), "detail": part.get("detail") or "auto"}
    if part["type"] == "refusal" and is_output:
        return {"type": "refusal", "refusal": part["refusal"]}
    text = part["refusal" if part["type"] == "refusal" else "text"]
    if not is_output:
        return {"type": "input_text", "text": text}
    lists = {name: part.get(name) or [] for name in ("annotations", "logprobs")}
    return {"type": "output_text", "text": text, **lists}


def _text(location: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidParameter(location, "must be text or a non-empty list of text parts")
    return "\n".join(_part(f"{location}[{index}]", part) for index, part in enumerate(content))


def _part(location: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidParameter(location, f"must be an object with type and text, got {type(part).__name__}")
    if str(part.get("type")) in _REFUSED_PARTS:
        raise InvalidParameter(f"{location}.type", f"{part['type']}: {_REFUSED_PARTS[part['type']]}")
    if part.get("type") == "refusal":
        return parse_at(location, _RefusalPart, part).refusal
    if part.get("type") == "input_image":
        image = parse_at(location, _ImagePart, part)
        if image.image_url is None:
            raise InvalidParameter(f"{location}.image_url", "is missing; files that were uploaded are not read")
        return image_mark(f"{location}.image_url", image.image_url)
    return parse_at(location, _TextPart, part).text
