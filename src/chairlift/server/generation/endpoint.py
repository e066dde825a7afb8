"""The interface of the generation endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.usage import Usage
from chairlift.server.http.errors import APIError
from chairlift.server.openai.types import EngineBody
from chairlift.server.process.messages import Update
from chairlift.text.reasoning.reasoning_use import ReasoningUse


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    prompts: list[list[int]]
    params: SamplingParams
    reasoning: ReasoningUse | None = None


class ResponseBuilder(Protocol):
    """Builds the response to one HTTP request from the engine's updates, whole or as server-sent events."""

    usage: Usage

    def add(self, update: Update) -> None:
        """Add an update to the whole response."""

    def body(self) -> Any:
        """Return the whole response, as JSON values."""

    def events(self, update: Update) -> Iterable[bytes]:
        """Return the stream's events for an update."""

    def end_events(self) -> Iterable[bytes]:
        """Return the events that end a complete stream."""

    def error_events(self, error: APIError) -> Iterable[bytes]:
        """Return the events that end a failed stream."""


class GenerationRequest(ABC):
    """One request to a generation endpoint.

    Its constructor validates the body. `GenerationHandler` then calls `tokenize`, submits the prompts to the engine,
    and feeds the engine's updates to the response builder.
    """

    id_prefix: ClassVar[str]  # prefix of the response's id
    prompt_parameter: str  # name of the prompt in errors
    num_prompts: int = 1
    at_once: int | None = None  # prompts submitted at the same time; the others follow when these are done

    def __init__(self, body: EngineBody, params: SamplingParams, max_tokens: int | None = None) -> None:
        """`max_tokens` is the number that the client gave."""
        self.body = body
        self.params = params
        self.max_tokens = max_tokens

    @abstractmethod
    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        """Tokenize the prompts; runs in a thread, once the request is admitted."""

    @abstractmethod
    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        """Create the builder of the response; called after `tokenize`."""

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        """Translate the parameter of an error to this endpoint's name."""
        return error
