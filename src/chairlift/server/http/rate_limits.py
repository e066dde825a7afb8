"""Middleware that applies the limits of API keys to POST requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.access.keys import APIKey
from chairlift.server.access.rate_limits import Grant, Headers, RateLimits
from chairlift.server.http.errors import APIError


class Allowance:
    """What one request is charged for."""

    def __init__(self, limits: RateLimits, grant: Grant) -> None:
        self._limits = limits
        self._grant = grant
        self._charged = 0

    @property
    def headers(self) -> Headers:
        """Those of the response."""
        return self._grant.headers

    async def charge(self, tokens: int) -> None:
        """Charge the tokens that the request may use, before it is submitted."""
        await self._limits.charge(self._grant, tokens)
        self._charged += tokens

    def settle(self, used: int | None) -> None:
        """End the request; `used` are its tokens, or None if it used what it was charged for."""
        self._limits.end(self._grant, 0 if used is None else self._charged - used)


class RateLimitGuard:
    """Counts requests of keys with limits, and adds OpenAI's rate limit headers to their responses."""

    def __init__(self, app: ASGIApp, *, limits: RateLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key: APIKey | None = scope["state"]["api_key"]
        scope["state"]["allowance"] = None
        if key is None or not key.limits or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            allowance = Allowance(self._limits, await self._limits.begin(key))
        except APIError as refusal:
            await refusal.response()(scope, receive, send)
            return
        scope["state"]["allowance"] = allowance
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message["headers"]}  # a refusal has its own
                headers = [(name.encode(), value.encode()) for name, value in allowance.headers.items()]
                message["headers"] = [*message["headers"], *(item for item in headers if item[0] not in names)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            usage = scope["state"].get("usage")
            used = None if usage is None else usage.prompt_tokens + usage.completion_tokens
            allowance.settle(0 if usage is None and status >= 400 else used)
