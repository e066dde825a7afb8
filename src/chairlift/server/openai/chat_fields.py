"""The fields of messages and tools in requests; for others the rule for unknown fields applies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.http.unknown_fields import check_unknown, without_unknown
from chairlift.server.served_model import ServedModel
from chairlift.text.messages import known_roles
from chairlift.text.tools.tool_use import ToolUse

_RETURNED = ("refusal", "reasoning", "reasoning_content", "annotations", "audio", "parsed")  # parts of responses
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", *_RETURNED)
_PART_FIELDS = ("type", "text", "refusal", "cache_control")
_CALL_FIELDS = ("id", "type", "index", "function")
_CALLED_FIELDS = ("name", "arguments", "parsed_arguments")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "max_tokens",
)
_REFUSED_FIELDS = {
    "function_call": "is not supported: it has given way to tool_calls",
    "audio": "is not supported: this server reads text only",
}


def check_message_fields(messages: Sequence[Mapping[str, Any]], named: Collection[str]) -> None:
    """Apply the rule for unknown fields to messages, and refuse known ones that would be lost. Fields that are `named`
    in the chat template are known."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        check_unknown(place, message, _MESSAGE_FIELDS, named)
        for name, problem in _REFUSED_FIELDS.items():
            if message.get(name) is not None and name not in named:
                raise InvalidParameter(f"{place}.{name}", problem)
        for part_index, part in _objects(message.get("content")):
            # Parts of other types are refused as such.
            if part.get("type") == "text":
                check_unknown(f"{place}.content[{part_index}]", part, _PART_FIELDS)
        for call_index, call in _objects(message.get("tool_calls")):
            call_place = f"{place}.tool_calls[{call_index}]"
            check_unknown(call_place, call, _CALL_FIELDS, named)
            if isinstance(function := call.get("function"), dict):
                check_unknown(f"{call_place}.function", function, _CALLED_FIELDS, named)


def encode_messages(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Return the prompt of a conversation that nothing is generated for. `options` are those of
    `Tokenizer.encode_chat`."""
    check_message_fields(messages, model.tokenizer.template_names)
    use = ToolUse.of(model.tool_format, known_tools(tools), None, None)
    roles = known_roles(messages, model.tokenizer.template_strings)
    return use.encode(model.tokenizer, roles, reasoning=model.reasoning_format, **options)


def checked_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of chat_template_kwargs without those that requests set by other parameters."""
    for reserved in _RESERVED_VARIABLES:
        if reserved in (given or ()):
            raise InvalidParameter("chat_template_kwargs", f"{reserved!r} cannot be set there")
    return dict(given or {})


def known_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools without unknown fields, which the chat template would show to the model."""
    if tools is None:
        return None
    return [_known_function(f"tools[{index}]", tool, _FUNCTION_FIELDS) for index, tool in enumerate(tools)]


def known_choice(choice: Any) -> Any:
    """Return a tool_choice without unknown fields."""
    return _known_function("tool_choice", choice, ("name",)) if isinstance(choice, dict) else choice


def _known_function(place: str, given: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    if given.get("type") != "function":
        return given  # refused as such
    kept = without_unknown(place, given, ("type", "function"))
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = without_unknown(f"{place}.function", function, fields)
    return kept


def _objects(values: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(values, list):
        return []
    return [(index, value) for index, value in enumerate(values) if isinstance(value, dict)]
