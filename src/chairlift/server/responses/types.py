"""The request body of /v1/responses: its translation to a chat completion request, and that of its input, a list of
items, to chat messages."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Entries, StrictModel, max_entries, parse_at
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, Effort, GenerationBody, Label, Tools
from chairlift.server.responses.tools import (
    ADDITIONAL_TOOLS,
    OfferedTools,
    check_encodable,
    custom_arguments,
    located_tools,
)
from chairlift.server.wire.unknown_fields import ignore, without_unknown

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"

_STATELESS = "nothing is kept between requests; send all earlier items in input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "prompts are not kept here; send the text as instructions and input",
    "moderation": "this server does not moderate texts",
}


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    """The effort goes to the chat template. There are no summaries: reasoning is returned as it is."""

    effort: Effort | Literal["max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None
    include_usage: Literal[True] | None = None  # sent by aiperf; the last event always has the usage


# Those about tools that a server runs ask for nothing here, since their calls are never made.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(GenerationBody):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Entries[Included] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None  # Responses are not kept, so none could be fetched later.
    # The response says what is true of it: it is not stored, and is served as all others are.
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    # Limits only the calls of tools that a server runs, of which there are none.
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    # Labels that the response repeats. Prefixes are shared by content, so those about caching have no effect.
    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA), max_entries(MAX_METADATA)] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex CLI sends it.
    # Has no effect until the context is full, and then the request is refused or shortened, as `truncation` says.
    context_management: Entries[dict[str, Any]] | None = None
    # Declared to be refused with a reason instead of as unknown parameters.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None

    @cached_property
    def offered_tools(self) -> OfferedTools:
        tools = located_tools("tools", self.tools or [])
        for index, item in enumerate(self.input if isinstance(self.input, list) else []):
            if item.get("type") == ADDITIONAL_TOOLS:
                tools += located_tools(f"input[{index}].tools", item.get("tools"))
        return OfferedTools(tools, self.tool_choice)

    @property
    def with_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or [])

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def verbosity(self) -> str | None:
        return self.text.verbosity if self.text else None

    @cached_property
    def text_format(self) -> dict[str, Any]:
        given = {"type": "text"} if self.text is None or self.text.format is None else self.text.format
        return without_unknown("text.format", given, ("type", "name", "description", "schema", "strict"))

    def check(self) -> None:
        """Refuse unsupported parameters and combinations."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise InvalidParameter(name, reason)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "only goes with stream: true")

    def as_chat(self, template_reads: Collection[str]) -> ChatRequest:
        """Return the equivalent chat completion request for a chat template that reads these variables."""
        chat = self.chat_request(
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.with_logprobs or None,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort="xhigh" if self.effort == "max" else self.effort,
            verbosity=self.verbosity if "verbosity" in template_reads else None,
            response_format=_response_format(self.text_format),
            tools=self.offered_tools.chat_tools(),
            tool_choice=self.offered_tools.chat_choice(),
            parallel_tool_calls=self.parallel_tool_calls if self.offered_tools else None,
        )
        check_encodable("text.format", self.text_format)
        return chat


def _response_format(given: dict[str, Any]) -> Any:
    """Convert {type, name, schema, strict} to {type, json_schema: {name, schema, strict}}."""
    if given == {"type": "text"}:
        return None
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


# ---- input -----------------------------------------------------------------------------------------------------------

_REFUSED_PARTS = {
    "input_image": "this server reads text only",
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
}
_REFUSED_ITEMS = {
    "item_reference": "nothing is kept between requests, so send the item itself (clients do so with store: false)",
    "compaction": "what another server has compacted cannot be read here; send the items that it stands for",
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

    type: str | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    phase: Literal["commentary", "final_answer"] | None = None


class _ToolCall(_Item):
    call_id: str
    name: str
    namespace: str | None = None
    caller: Any = None  # Nothing but the model calls tools here.


class _FunctionCall(_ToolCall):
    arguments: str

    @property
    def chat_arguments(self) -> str:
        return self.arguments


class _CustomToolCall(_ToolCall):
    input: str

    @property
    def chat_arguments(self) -> str:
        return custom_arguments(self.input)


class _ReasoningPart(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _CallOutput(_Item):
    call_id: str
    output: Any
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class _AdditionalTools(_Item):
    """Further tools, which `ResponsesRequest.offered_tools` reads."""

    role: Literal["developer"] | None = None
    tools: Entries[dict[str, Any]]


class _Reasoning(_Item):
    """Reasoning of an earlier response. A summary is read if there is no text; encrypted content cannot be read."""

    content: Entries[_ReasoningPart] | None = None
    summary: Entries[_ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or [])


class _TextPart(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None  # added by the official client


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
    ADDITIONAL_TOOLS: _AdditionalTools,
}
_PARTS = ("input_text", *_REFUSED_PARTS)  # A user's message has these parts, which may also stand alone.


class InputMessages:
    """Chat messages and the location of each in the request."""

    def __init__(
        self, given: str | list[dict[str, Any]], instructions: str | None = None, tools: OfferedTools | None = None
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._locations: list[list[str]] = []  # They are those of a message, then of its tool calls.
        self._tools = tools or OfferedTools()
        self._call_ids: set[str] = set()
        self._reasoning = ""  # It belongs to the assistant message that follows.
        if instructions is not None:
            self._add("instructions", {"role": "system", "content": instructions})
        if isinstance(given, str):
            self._add("input", {"role": "user", "content": given})
        else:
            self._add_items(given)

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

    def _add_items(self, given: list[dict[str, Any]]) -> None:
        for are_parts, group in groupby(enumerate(given), lambda one: one[1].get("type") in _PARTS):
            items = [(f"input[{index}]", item) for index, item in group]
            if are_parts:  # Parts without a message are one of the user.
                text = "\n".join(_part(location, part) for location, part in items)
                self._add(items[0][0], {"role": "user", "content": text})
                continue
            for location, item in items:
                kind = item.get("type")
                if isinstance(kind, str) and kind in _LEFT_OUT_ITEMS:
                    ignore(f"{location}.{kind}", "this server runs no tools itself")
                else:
                    self._add_item(location, item)

    def _add_item(self, location: str, given: dict[str, Any]) -> None:
        match _parse_item(location, given):
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


def _parse_item(location: str, given: dict[str, Any]) -> _Item:
    kind = given.get("type")
    if kind is None and "role" in given:
        kind = "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = f"must be one of {', '.join(_KINDS)}, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"{location}.type", _REFUSED_ITEMS.get(str(kind), known))
    return parse_at(location, _KINDS[kind], given)


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
    return parse_at(location, _TextPart, part).text
