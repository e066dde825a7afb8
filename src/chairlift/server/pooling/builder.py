"""Collects the pooled vectors of a request."""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from chairlift.server.generation.endpoint import ResponseBuilder
from chairlift.server.generation.usage import Usage
from chairlift.server.http.errors import APIError
from chairlift.server.process.messages import Update


class PooledResponseBuilder(ResponseBuilder):
    """The response to a request whose prompts become vectors; it is never streamed."""

    def __init__(self, response_id: str, completion_ids: Sequence[str], usage: Usage, model: str) -> None:
        self.usage = usage
        self.head = {"id": response_id, "created": int(time.time()), "model": model}
        self._vectors = dict.fromkeys(completion_ids, b"")

    def add(self, update: Update) -> None:
        self._vectors[update.request_id] += update.vector

    @property
    def packed_vectors(self) -> list[bytes]:
        """The vectors of all prompts as float32."""
        return list(self._vectors.values())

    @property
    def vectors(self) -> list[array[float]]:
        return [array("f", vector) for vector in self._vectors.values()]

    def usage_body(self) -> dict[str, Any]:
        return {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}

    @abstractmethod
    def body(self) -> Any: ...

    def events(self, update: Update) -> list[bytes]:
        raise NotImplementedError

    def end_events(self) -> list[bytes]:
        raise NotImplementedError

    def error_events(self, error: APIError) -> list[bytes]:
        raise NotImplementedError
