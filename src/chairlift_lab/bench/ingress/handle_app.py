"""What Ray Serve offers without an own relay: its HTTP proxy, an ingress, and a streaming handle to stub replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

END = b"data: [DONE]\n\n"


class StubGenerator:
    """Yields the events of a stream at fixed times."""

    def __init__(self, token_seconds: float) -> None:
        self._token_seconds = token_seconds

    async def stream(self, tokens: int) -> AsyncIterator[bytes]:
        event = b"data: " + json.dumps({"choices": [{"index": 0, "text": " token"}]}).encode() + b"\n\n"
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(tokens):
            due += self._token_seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield event
        yield END


class HandleIngress:
    def __init__(self, generators: Any) -> None:
        self._generators = generators.options(stream=True, method_name="stream")

    async def __call__(self, request: Request) -> StreamingResponse:
        tokens = (await request.json())["max_tokens"]
        return StreamingResponse(self._generators.remote(tokens), media_type="text/event-stream")


def make_handle_app(replicas: int, token_seconds: float) -> Any:
    from ray import serve

    common: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1_000_000}
    generators = serve.deployment(StubGenerator, num_replicas=replicas, **common)
    return serve.deployment(HandleIngress, **common).bind(generators.bind(token_seconds))
