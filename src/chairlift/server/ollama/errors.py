"""The paths of Ollama's API, and its errors: {"error": message}."""

from __future__ import annotations

from typing import Any

OLLAMA_PREFIX = "/api/"
OLLAMA_PATHS = tuple(
    f"{OLLAMA_PREFIX}{name}"
    for name in (
        *("chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version"),
        *("pull", "push", "create", "copy", "delete"),
    )
)


def ollama_error(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Convert an error body of OpenAI's format. The parameter's name is in the message already, or put before it."""
    error = body["error"]
    if isinstance(error, str):
        return body
    message, parameter = error["message"], error["param"]
    return {"error": f"{parameter}: {message}" if parameter and parameter not in message else message}
