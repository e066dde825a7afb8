"""Checks of bodies against OpenAI's OpenAPI document.

The types of the official client are generated from that document and hold the types of all fields, but not that a
field is required if it may be null: those are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import TypeAdapter

_LOGPROBS = {
    "choices[].logprobs": ("content", "refusal"),
    "choices[].logprobs.content[]": ("token", "logprob", "bytes", "top_logprobs"),
    "choices[].logprobs.content[].top_logprobs[]": ("token", "logprob", "bytes"),
}
_USAGE = {"usage": ("prompt_tokens", "completion_tokens", "total_tokens")}

# Of each schema: the type in the client's package, and the required fields of each object.
SCHEMAS: dict[str, tuple[type[Any], dict[str, tuple[str, ...]]]] = {
    "CreateChatCompletionResponse": (
        ChatCompletion,
        {
            "": ("id", "object", "created", "model", "choices"),
            "choices[]": ("index", "message", "logprobs", "finish_reason"),
            "choices[].message": ("role", "content", "refusal"),
            "choices[].message.tool_calls[]": ("id", "type", "function"),
            "choices[].message.tool_calls[].function": ("name", "arguments"),
            **_LOGPROBS,
            **_USAGE,
        },
    ),
    "CreateChatCompletionStreamResponse": (
        ChatCompletionChunk,
        {
            "": ("id", "object", "created", "model", "choices"),
            "choices[]": ("index", "delta", "finish_reason"),
            "choices[].delta.tool_calls[]": ("index",),
            **_LOGPROBS,
            **_USAGE,
        },
    ),
    "CreateCompletionResponse": (
        Completion,
        {
            "": ("id", "object", "created", "model", "choices"),
            "choices[]": ("index", "text", "logprobs", "finish_reason"),
            **_USAGE,
        },
    ),
    "Response": (
        Response,
        {
            "": (
                *("id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools"),
                *("output", "parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p"),
            ),
            "usage": ("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"),
            "usage.input_tokens_details": ("cached_tokens",),
            "usage.output_tokens_details": ("reasoning_tokens",),
        },
    ),
    "CreateEmbeddingResponse": (
        CreateEmbeddingResponse,
        {
            "": ("object", "model", "data", "usage"),
            "data[]": ("object", "index", "embedding"),
            "usage": ("prompt_tokens", "total_tokens"),
        },
    ),
}

_OF_AN_ITEM, _OF_A_PART = ("item_id", "output_index"), ("item_id", "output_index", "content_index")
# Of each event of a streamed response: the required fields beside its type and number.
EVENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")), ("response",)
    ),
    **dict.fromkeys(("response.output_item.added", "response.output_item.done"), ("output_index", "item")),
    **dict.fromkeys(("response.content_part.added", "response.content_part.done"), (*_OF_A_PART, "part")),
    "response.output_text.delta": (*_OF_A_PART, "delta", "logprobs"),
    "response.output_text.done": (*_OF_A_PART, "text", "logprobs"),
    "response.reasoning_text.delta": (*_OF_A_PART, "delta"),
    "response.reasoning_text.done": (*_OF_A_PART, "text"),
    "response.function_call_arguments.delta": (*_OF_AN_ITEM, "delta"),
    "response.function_call_arguments.done": (*_OF_AN_ITEM, "name", "arguments"),
    "response.custom_tool_call_input.delta": (*_OF_AN_ITEM, "delta"),
    "response.custom_tool_call_input.done": (*_OF_AN_ITEM, "input"),
    "error": ("code", "message", "param"),
}
ITEMS: dict[str, tuple[str, ...]] = {
    "message": ("id", "role", "status", "content"),
    "reasoning": ("id", "summary"),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
}
PARTS: dict[str, tuple[str, ...]] = {"output_text": ("text", "annotations", "logprobs"), "reasoning_text": ("text",)}


def check_response(body: dict[str, Any]) -> None:
    """Raise if a response, or one of its items, does not match the schema."""
    check("Response", body)
    for item in body["output"]:
        _require(item, ITEMS[item["type"]])
        for part in item.get("content", ()):
            _require(part, PARTS[part["type"]])


def check_event(event: dict[str, Any]) -> None:
    """Raise if an event of a streamed response does not match its schema."""
    _require(event, ("type", "sequence_number", *EVENTS[event["type"]]))
    if "response" in event:
        check_response(event["response"])


def _require(found: dict[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in found]
    assert not missing, f"{found.get('type')} lacks {missing}: {found}"


def check(schema: str, body: dict[str, Any]) -> None:
    """Raise if `body` does not match the schema of this name."""
    kind, required = SCHEMAS[schema]
    TypeAdapter(kind).validate_python(body, strict=True)
    for path, names in required.items():
        for found in _at(body, path):
            missing = [name for name in names if name not in found]
            assert not missing, f"{schema}: {path or 'the body'} lacks {missing}: {found}"


def _at(value: Any, path: str) -> Iterator[dict[str, Any]]:
    """Find the objects at a path such as `choices[].message`; absent and null ones are left out."""
    if not path:
        yield value
        return
    step, _, rest = path.partition(".")
    found = value.get(step.removesuffix("[]"))
    for item in found if isinstance(found, list) else [found]:
        if item is not None:
            yield from _at(item, rest)
