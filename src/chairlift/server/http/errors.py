"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from chairlift.errors import EngineDead, InvalidParameter, TemporaryFailure, UnsupportedModel


class APIError(HTTPException):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        message, param = _sendable(message), param and _sendable(param)
        self.body: dict[str, Any] = {"error": {"message": message, "type": type_, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status_code, headers=self.headers)


def _sendable(text: str) -> str:
    """JSON can say half a character (a lone surrogate), and an error may quote it; a reply cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_api_error(error: Exception) -> APIError:
    """What a client may know of an error: never a path, a traceback or the name of a class."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidParameter):
        return APIError(400, str(error), param=error.parameter, code="invalid_value")
    if isinstance(error, UnsupportedModel):
        return APIError(400, "the model's chat template or tokenizer cannot take this input", code="invalid_value")
    if isinstance(error, TemporaryFailure):
        return unavailable("the request could not be answered just now; try again shortly")
    if isinstance(error, EngineDead):
        return unavailable("the engine is not available; try again shortly")
    return APIError(500, "internal error", type_="server_error")


def unavailable(message: str) -> APIError:
    return APIError(503, message, type_="service_unavailable", headers={"Retry-After": "1"})


def timed_out() -> APIError:
    problem = "the request's timeout passed before it was finished"
    return APIError(408, problem, type_="timeout_error", code="timeout")
