"""A blocking client: one request at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from chairlift.client.http import Address, bearer
from chairlift.errors import ChairliftError

TIMEOUT_SECONDS = 600.0  # Two pieces of data from the server are no further apart.


class ServerError(ChairliftError):
    """The server cannot be reached, refuses a request, or sends an unexpected response."""


class BlockingClient:
    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        self.address = address
        self._headers = {"Content-Type": "application/json", "User-Agent": "chairlift"}
        if api_key:
            self._headers["Authorization"] = bearer(api_key)

    def served_model(self) -> dict[str, Any]:
        """Return the description of the first model that the server lists."""
        with self._exchange("GET", "/v1/models") as response:
            try:
                model: dict[str, Any] = json.loads(response.read())["data"][0]
                str(model["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self.address}/v1/models does not list models; name the --model") from None
            return model

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response; closing the iterator closes the connection."""
        with self._exchange("POST", path, json.dumps(dict(body)).encode()) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield self._event(data)

    def watch(self, path: str) -> Iterator[bytes]:
        """Yield the data of an endless stream of server-sent events."""
        with self._exchange("GET", path) as response:
            for line in response:
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip()

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ServerError(f"{self.address} sends events that are not what OpenAI has")
        if event.get("error"):
            raise ServerError(f"the server failed: {_message(event)}")
        return event

    @contextmanager
    def _exchange(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self.address.tls else HTTPConnection
        with closing(kind(self.address.host, self.address.port, timeout=TIMEOUT_SECONDS)) as connection:
            try:
                connection.request(method, self.address.root + path, body, self._headers)
            except OSError as error:
                problem = error.strerror or error or type(error).__name__
                raise ServerError(f"no server at {self.address}: {problem}") from None
            try:
                response = connection.getresponse()
                if response.status != 200:
                    raise ServerError(f"the server refuses ({response.status}): {_refusal(response)}")
                yield response
            except (OSError, HTTPException) as error:
                problem = str(error) or type(error).__name__
                raise ServerError(f"{self.address} did not answer to the end: {problem}") from None


def _refusal(response: HTTPResponse) -> str:
    try:
        return _message(json.loads(response.read(10_000)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return response.reason


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
