"""Clients that keep a fleet busy and record how each of their requests ended."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server.running_server import NAME

COMPLETE, ERROR_EVENT, CUT = "complete", "error event", "cut"


@dataclass
class Load:
    """Endings of requests: a status, or for streams how they ended; and failures to connect."""

    url: str
    clients: int = 6
    tokens: int = 40
    retry: bool = False  # whether to repeat whole requests whose connection broke, as clients of an API do
    whole: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    last_success: float = 0.0
    _stop: bool = False
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        assert self._thread is not None
        self._thread.join(120)
        assert not self._thread.is_alive(), "a request has no ending"

    def num_complete(self) -> int:
        return self.whole["200"] + self.streams[COMPLETE]

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        index = 0
        while not self._stop:
            index += 1
            body = {
                "model": NAME,
                "prompt": f"client {number} " * 30 + str(index),
                "max_tokens": self.tokens,
                "ignore_eos": True,
            }
            if number % 2:
                self.streams[await self._stream(client, body | {"stream": True})] += 1
            else:
                self.whole[await self._whole(client, body)] += 1

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        deadline = time.monotonic() + 60
        while True:
            try:
                response = await client.post(f"{self.url}/v1/completions", json=body)
                tokens = response.json()["usage"]["completion_tokens"] if response.status_code == 200 else None
                if tokens not in (None, self.tokens):
                    return f"{tokens} tokens"
                self._note(response.text if response.status_code != 200 else "")
                return str(response.status_code)
            except httpx.TransportError as error:
                if not self.retry or time.monotonic() > deadline:
                    self._note(repr(error))
                    return "broken"
                await asyncio.sleep(0.2)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        events: list[str] = []
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    self._note((await response.aread()).decode())
                    return str(response.status_code)
                async for line in response.aiter_lines():
                    events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
        except httpx.TransportError as error:
            self._note(repr(error))
            return CUT if events else "broken"
        return self._ending(events)

    def _ending(self, events: list[str]) -> str:
        """How a stream ended; each has exactly one ending, and every event is whole JSON."""
        if not events or events.count("[DONE]") != 1 or events[-1] != "[DONE]":
            return CUT
        parsed = [json.loads(event) for event in events[:-1]]
        errors = [event for event in parsed if "error" in event]
        reasons = [event["choices"][0]["finish_reason"] for event in parsed if "choices" in event]
        finished = [reason for reason in reasons if reason is not None]
        if errors:
            return ERROR_EVENT if len(errors) == 1 and not finished else CUT
        self._note("")
        return COMPLETE if finished == ["length"] else CUT

    def _note(self, problem: str) -> None:
        if problem:
            self.details.append(problem[:200])
        else:
            self.last_success = time.monotonic()
