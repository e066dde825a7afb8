"""Checks of error responses."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import httpx

from chairlift.server.llamacpp.errors import LLAMACPP_PATHS
from tests.server.running_server import RunningServer


def check_shape(path: str, response: httpx.Response) -> str:
    """Check the form of an error, which is that of the API that the path is of, and return its message."""
    error = response.json()["error"]
    if path.startswith("/api/"):
        assert response.json().keys() == {"error"}
        return str(error)
    assert error.keys() == {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
    if path in LLAMACPP_PATHS:
        assert error["code"] == response.status_code
    return str(error["message"])


def nested(depth: int) -> list[Any]:
    return [] if depth == 0 else [nested(depth - 1)]


def expect(
    server: RunningServer,
    response: httpx.Response,
    status: int,
    param: str | None,
    code: str | EllipsisType | None = ...,
) -> None:
    """Check for this error in OpenAI's format, from a server that stays healthy and holds no blocks."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error", error
    assert code is ... or error["code"] == code, error
    assert response.headers["x-request-id"]
    for leak in ("Traceback", "site-packages", ".py", "Error("):
        assert leak not in error["message"]
    assert server.get("/health").status_code == 200
    server.wait_idle()
    assert server.metric("chairlift_requests_open") == 0
