"""One path for each endpoint, however a client writes it.

Clients join a base URL and a path in every way: without /v1, or with two slashes. The guards, the limits, the routes
and the log all see the endpoint's own path, because it is replaced before any of them.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_UNDER_V1 = (
    *("/chat/completions", "/completions", "/responses", "/responses/compact", "/responses/input_tokens"),
    *("/messages", "/messages/count_tokens", "/embeddings", "/models", "/files", "/batches"),
)
_PATHS = frozenset(
    (
        *(f"/v1{path}" for path in _UNDER_V1),
        *("/v1/score", "/v1/rerank", "/v2/rerank", "/score", "/rerank", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/ping", "/version", "/metrics", "/dashboard"),
    )
)
# What follows is a name or an id, which may have slashes of its own.
_WITH_ID = re.compile(r"/+(?:v1/+)?(models|files|batches)/(.+)", re.DOTALL)


def endpoint_path(path: str) -> str:
    """Return the path of the endpoint that a client means; other paths are returned unchanged."""
    single = re.sub(r"/{2,}", "/", path)
    for known in (single, f"/v1{single}"):
        if known in _PATHS:
            return known
    if single == "/v1/health":
        return "/health"
    if found := _WITH_ID.fullmatch(path):
        return f"/v1/{found[1]}/{found[2]}"
    return path


class EndpointPaths:
    """The outermost middleware: gives every layer the endpoint's own path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": endpoint_path(scope["path"])}
        await self._app(scope, receive, send)
