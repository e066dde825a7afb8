"""Errors of the routes as responses in OpenAI's format, and what was meant where there is no route."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.generation.endpoint import invalid_field
from chairlift.server.http.pages import DOCS_PATH
from chairlift.server.wire.errors import APIError, as_api_error


def add_error_handlers(app: FastAPI, *, dashboard: bool) -> None:
    """Add what turns errors into responses, to an app that has all its routes."""
    app.state.hints = PathHints(app.routes, dashboard=dashboard)
    app.add_exception_handler(ChairliftError, _chairlift_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


async def _chairlift_error(_: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, APIError):
        return error.response()
    # The web framework's own: a path or a method without a route, or a body nested too deeply.
    hints: PathHints = http.app.state.hints
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return hints.unknown_path(http.scope["path"]).response()
    if error.status_code == 405:
        return hints.wrong_method(http.scope["path"], http.method, headers.get("Allow", "")).response()
    code = "invalid_json" if error.status_code == 400 else None
    return APIError(error.status_code, str(error.detail), code=code, headers=headers).response()


async def _validation_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    place, *path = error.errors()[0]["loc"]
    if place in ("query", "path"):
        return as_api_error(InvalidParameter(str(path[0]), str(error.errors()[0]["msg"]))).response()
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if http.method == "POST" and media_type != "application/json":  # FastAPI parses no other bodies
        problem = "send the body as JSON, with the header Content-Type: application/json"
        return APIError(415, problem, code="unsupported_media_type").response()
    errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # The first part is "body".
    if errors[0]["type"] == "json_invalid":
        return APIError(400, "the body is not valid JSON", code="invalid_json").response()
    return as_api_error(invalid_field(errors, error.body)).response()


# ---- paths without an endpoint ---------------------------------------------------------------------------------------

_SHOWN = 100  # characters of a path that are quoted and compared
_MAX_PARTS = 12
_PAGES = frozenset({"chat", "ui", "web", "webui", "playground", "admin", "index.html", "dashboard"})
_DOCUMENTS = frozenset({"redoc", "swagger", "swagger.json", "api-docs", "openapi.yaml", "help"})
_OTHER_SERVICES = {
    "audio": "speech",
    "images": "pictures",
    "videos": "videos",
    "moderations": "moderation",
    "fine_tuning": "training",
    "assistants": "assistants; use /v1/responses",
    "threads": "threads; use /v1/responses",
    "vector_stores": "vector stores; use /v1/embeddings",
}


class PathHints:
    """What a client may have meant by a path that no route has, at a cost that does not grow with the path."""

    def __init__(self, routes: Iterable[BaseRoute], *, dashboard: bool) -> None:
        self._dashboard = dashboard
        self._methods: dict[str, list[str]] = {}
        for route in routes:
            if isinstance(route, Route) and "{" not in route.path:
                self._methods.setdefault(route.path, []).extend(sorted((route.methods or set()) - {"HEAD"}))
        self._by_key = {_key(path): path for path in reversed(self._methods)}

    def unknown_path(self, path: str) -> APIError:
        shown = path[:_SHOWN]
        return APIError(404, f"there is nothing at {shown!r}; {self._hint(shown)}", code="unknown_url")

    def wrong_method(self, path: str, method: str, allowed: str) -> APIError:
        takes = ", ".join(name for name in allowed.split(", ") if name != "HEAD")
        problem = f"{path[:_SHOWN]!r} takes {takes}, not {method[:20]}"
        return APIError(405, problem, code="method_not_allowed", headers={"Allow": allowed})

    def _hint(self, path: str) -> str:
        if found := self._closest(path):
            return f"did you mean {' or '.join(self._methods[found])} {found}?"
        parts = {part.lower() for part in path.split("/")[:_MAX_PARTS]}
        if parts & _PAGES and "v1" not in parts:
            other = "is off here (--no-dashboard)" if not self._dashboard else "is at /dashboard"
            return f"the page for people, with a chat, {other}"
        if parts & _DOCUMENTS:
            return f"the endpoints are listed at {DOCS_PATH} and in /openapi.json"
        for name in parts & _OTHER_SERVICES.keys():
            return f"this server has no {_OTHER_SERVICES[name]}"
        return f"the endpoints are listed at {DOCS_PATH}"

    def _closest(self, path: str) -> str | None:
        """Return the route whose path is in this one, or else the one that is written most like it."""
        parts = [part for part in path.split("/") if part][:_MAX_PARTS]
        for begin in range(len(parts)):
            tails = [prefix + "/".join(parts[begin:]) for prefix in ("/", "/v1/")]
            if exact := [tail for tail in tails if tail in self._methods]:
                return exact[0]
            if alike := [found for tail in tails if (found := self._by_key.get(_key(tail)))]:
                return alike[0]
        longer = [known for known in self._methods if len(parts) > 1 and known.startswith("/" + "/".join(parts) + "/")]
        if longer:
            return longer[0]
        written = difflib.get_close_matches(path.lower(), self._methods, n=1, cutoff=0.8)
        return written[0] if written else None


def _key(path: str) -> str:
    """Return what paths share that differ in case, hyphens, and singular or plural."""
    return "/".join(part.rstrip("s") for part in re.sub(r"[-_]", "", path.lower()).split("/") if part)
