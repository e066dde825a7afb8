"""Streamed events of /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server import openai_document
from tests.server.running_server import RunningServer

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATH = "/v1/responses"


def sse(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream after checking their `event:` lines, numbers, types and required fields."""
    events = []
    with httpx.stream("POST", server.url + PATH, json={"stream": True, **body}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for block in "".join(response.iter_text()).strip().split("\n\n"):
            if block.startswith(":"):  # a ping
                continue
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            assert event["sequence_number"] == len(events)
            OFFICIAL.validate_python(event, strict=True)
            openai_document.check_event(event)
            events.append(event)
    return events


def in_order(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, with consecutive equal ones merged."""
    kinds = [event["type"] for event in events]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
