"""Sending of batch requests: to the application in this process, or to another server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chairlift.client.http import BadResponse, HttpClient
from chairlift.errors import ChairliftError, EngineDead
from chairlift.server.app import make_app
from chairlift.server.batch.output import output_tokens
from chairlift.server.batch.run import BatchResponse, Send, call
from chairlift.server.config import ServerConfig
from chairlift.server.front_end import make_engine, make_service
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState

UNREACHABLE_SECONDS = 60.0  # an unreachable server ends the run after this time
RETRY_SECONDS = 1.0


@asynccontextmanager
async def own_engine(config: ServerConfig) -> AsyncIterator[Send]:
    """Start an engine and handle requests as the server does, without a network."""
    metrics = Metrics()
    engine = make_engine(config, metrics)
    app = make_app(make_service(config, engine, metrics, chat_template=None))
    try:
        async with app.router.lifespan_context(app):
            await _require_ready(engine)

            async def send(path: str, body: bytes) -> BatchResponse:
                await _require_ready(engine)
                return await call(app, path, body)

            yield send
    finally:
        await engine.stop()


async def _require_ready(engine: EngineClient) -> None:
    """Wait until the engine is started or restarted; raise if it failed."""
    if await engine.wait_until_settled() is not EngineState.READY:
        raise EngineDead(f"the engine failed: {engine.problem}")


@asynccontextmanager
async def remote_server(http: HttpClient) -> AsyncIterator[Send]:
    """Send to a running server; wait while it is temporarily unreachable."""

    async def send(path: str, body: bytes) -> BatchResponse:
        end = time.monotonic() + UNREACHABLE_SECONDS
        while True:
            parts: list[bytes] = []
            try:
                response = await http.post(path, body, parts.append)
                if response.status != 503:
                    line, tokens = _as_json_line(b"".join(parts))
                    request_id = response.headers.get("x-request-id", "")
                    return BatchResponse(response.status, request_id, line, output_tokens=tokens)
                problem = "it answers with status 503"
            except (OSError, BadResponse) as error:
                problem = str(error)
            if time.monotonic() > end:
                raise ChairliftError(f"the server at {http.address} is not available: {problem}")
            await asyncio.sleep(RETRY_SECONDS)

    try:
        yield send
    finally:
        http.close()


def _as_json_line(body: bytes) -> tuple[bytes, int]:
    """Convert a body to one line of JSON for the output file, and count its output tokens. Other servers may send
    several lines; an HTML page of a proxy becomes an error that quotes it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fields = {"error": {"message": body[:1000].decode(errors="replace"), "type": "not_json"}}
    elif b"\n" not in body and b"\r" not in body:
        return body, output_tokens(fields)
    return json.dumps(fields).encode(), output_tokens(fields)
