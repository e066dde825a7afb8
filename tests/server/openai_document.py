"""Checks of bodies against OpenAI's OpenAPI document.

The types of the official client are generated from that document and hold the types of all fields, but not that a
field is required if it may be null: those are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
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
    "CreateEmbeddingResponse": (
        CreateEmbeddingResponse,
        {
            "": ("object", "model", "data", "usage"),
            "data[]": ("object", "index", "embedding"),
            "usage": ("prompt_tokens", "total_tokens"),
        },
    ),
}


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
