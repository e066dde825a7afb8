"""The engine's updates in the shapes that OpenAI clients expect."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from chairlift.core.logprobs import TokenLogprobs
from chairlift.server.http.errors import APIError
from chairlift.server.openai.logprobs import CompletionLogprobs, chat_logprobs
from chairlift.server.process.messages import Update
from chairlift.text.tokenizer import Tokenizer

json_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _boarded: set[str] = field(default_factory=set)  # completions whose cached tokens are known

    def take_in(self, update: Update) -> None:
        self.completion_tokens += len(update.tokens)
        # A preempted completion boards again; and completions of the same prompt share it: what was cached is told
        # once, by the first of them.
        if update.cached_tokens is not None and update.request_id not in self._boarded:
            self._boarded.add(update.request_id)
            if "#" not in update.request_id:
                self.cached_tokens += update.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer(Protocol):
    """One HTTP request's answer in the words of its endpoint: whole, or as a stream of events."""

    usage: Usage

    def keep(self, update: Update) -> None:
        """Take in a part of the whole answer."""

    def body(self) -> dict[str, Any]:
        """The whole answer."""

    def events(self, update: Update) -> Iterable[bytes]:
        """What a stream says of an update."""

    def ending(self) -> Iterable[bytes]:
        """What a stream says when all of it has been told."""

    def failure(self, error: APIError) -> Iterable[bytes]:
        """What a stream says when it cannot be finished."""


@dataclass(slots=True)
class Choice:
    """One completion as far as it is known."""

    index: int
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    started: bool = False  # whether a streamed chunk of it has been sent
    scores: CompletionLogprobs = field(default_factory=CompletionLogprobs)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, update: Update) -> None:
        """Keep an update for the whole answer; a stream passes it on instead."""
        self.parts.append(update.text)
        self.logprobs += update.logprobs
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason
        self.score = update.score


class Shape(Protocol):
    """How one endpoint words its answers."""

    stream_object: str
    object: str

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]: ...
    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]: ...


@dataclass(slots=True)
class ChatShape:
    with_logprobs: bool
    object: str = "chat.completion"
    stream_object: str = "chat.completion.chunk"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs, tokenizer),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if update.text or not choice.started:
            delta["content"] = update.text
        return [
            {
                "index": choice.index,
                "delta": delta,
                "logprobs": self.logprobs(update.logprobs, tokenizer),
                "finish_reason": update.finish_reason,
                "stop_reason": update.stop_reason,
            }
        ]

    def logprobs(self, given: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": chat_logprobs(given, tokenizer)}


@dataclass(slots=True)
class TextShape:
    with_logprobs: bool
    echoes: list[str]  # the prompt's text for each choice, or empty
    object: str = "text_completion"
    stream_object: str = "text_completion"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        text = self.echoes[choice.index] + choice.text
        return self._body(choice, text, choice.logprobs, choice, tokenizer)

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        text = update.text if choice.started else self.echoes[choice.index] + update.text
        return [self._body(choice, text, update.logprobs, update, tokenizer)]

    def _body(
        self, choice: Choice, text: str, found: list[TokenLogprobs], end: Choice | Update, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": choice.scores.take(found, tokenizer) if self.with_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }


class Reply:
    """The answer to a chat or a text completion."""

    def __init__(
        self,
        shape: Shape,
        model: str,
        tokenizer: Tokenizer,
        request_id: str,
        ids: list[str],
        usage: Usage,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.usage = usage
        self.choices = [Choice(index) for index in range(len(ids))]
        self._of = dict(zip(ids, self.choices, strict=True))
        self._shape = shape
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def keep(self, update: Update) -> None:
        self._of[update.request_id].add(update)

    def body(self) -> dict[str, Any]:
        choices = [
            self._shape.choice(choice, self._tokenizer) | ({} if choice.score is None else {"score": choice.score})
            for choice in self.choices
        ]
        return {**self._head, "object": self._shape.object, "choices": choices, "usage": self.usage.body()}

    def events(self, update: Update) -> list[bytes]:
        if not (update.tokens or update.text or update.finish_reason):
            return []
        choice = self._of[update.request_id]
        deltas = self._shape.deltas(choice, update, self._tokenizer)
        choice.started = True
        return [self._chunk([delta], with_usage=self._continuous_usage) for delta in deltas]

    def ending(self) -> list[bytes]:
        return [*([self._chunk([], with_usage=True)] if self._include_usage else []), b"data: [DONE]\n\n"]

    def failure(self, error: APIError) -> list[bytes]:
        return [_event(error.body), b"data: [DONE]\n\n"]

    def _chunk(self, choices: list[dict[str, Any]], *, with_usage: bool) -> bytes:
        chunk = {**self._head, "object": self._shape.stream_object, "choices": choices}
        return _event(chunk | {"usage": self.usage.body()} if with_usage else chunk)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json_encoder.encode(body) + b"\n\n"
