"""The paths of llama.cpp's server, and its errors: {"error": {"code": status, "message", "type"}}."""

from __future__ import annotations

from typing import Any

from chairlift.errors import CONTEXT_LENGTH_EXCEEDED

# Those that only llama.cpp has: /tokenize, /detokenize and /health are also of other servers, and keep their errors.
LLAMACPP_PATHS = ("/completion", "/infill", "/embedding", "/apply-template", "/props", "/slots", "/reranking")

# The types of llama.cpp by status; others are invalid requests below 500, and errors of the server above.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def llamacpp_error(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Convert an error body of OpenAI's format."""
    error = body["error"]
    if isinstance(error["code"], int):  # a server behind an ingress has converted it
        return body
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if error["code"] == CONTEXT_LENGTH_EXCEEDED:
        type_ = "exceed_context_size_error"
    return {"error": {"code": status, "message": error["message"], "type": type_, "param": error["param"]}}
