"""The engine's updates in the shapes that OpenAI clients expect."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from chairlift.core.logprobs import TokenLogprobs
from chairlift.serving.messages import Update
from chairlift.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """One completion as far as it is known."""

    index: int
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    started: bool = False  # whether a streamed chunk of it has been sent
    boarded: bool = False  # whether its cached tokens are known
    scored: int = 0  # characters of the tokens whose logprobs have been told

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, update: Update) -> None:
        """Keep an update for the whole answer; a stream passes it on instead."""
        self.parts.append(update.text)
        self.logprobs += [found for found in update.logprobs if found is not None]
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason


class Shape(Protocol):
    """How one endpoint words its answers."""

    stream_object: str
    object: str

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]: ...
    def delta(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> dict[str, Any]: ...


@dataclass(slots=True)
class ChatShape:
    with_logprobs: bool
    object: str = "chat.completion"
    stream_object: str = "chat.completion.chunk"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs, tokenizer),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def delta(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if update.text or not choice.started:
            delta["content"] = update.text
        found = [item for item in update.logprobs if item is not None]
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(found, tokenizer),
            "finish_reason": update.finish_reason,
        }

    def _logprobs(self, found: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = tokenizer.decode([token], skip_special_tokens=False)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
                for item in found
            ]
        }


@dataclass(slots=True)
class TextShape:
    with_logprobs: bool
    echoes: list[str]  # the prompt's text for each choice, or empty
    object: str = "text_completion"
    stream_object: str = "text_completion"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        text = self.echoes[choice.index] + choice.text
        return self._body(choice, text, choice.logprobs, choice, tokenizer)

    def delta(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> dict[str, Any]:
        text = update.text if choice.started else self.echoes[choice.index] + update.text
        found = [item for item in update.logprobs if item is not None]
        return self._body(choice, text, found, update, tokenizer)

    def _body(
        self, choice: Choice, text: str, found: list[TokenLogprobs], end: Choice | Update, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, found, tokenizer) if self.with_logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _logprobs(self, choice: Choice, found: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
        def text_of(token: int) -> str:
            return tokenizer.decode([token], skip_special_tokens=False)

        tokens = [text_of(item.token_id) for item in found]
        *offsets, choice.scored = accumulate(map(len, tokens), initial=choice.scored)
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in found],
            "top_logprobs": [{text_of(token): value for token, value in item.top} for item in found],
            "text_offset": offsets,
        }


class Reply:
    """One HTTP request's answer, whole or in chunks."""

    def __init__(self, shape: Shape, request_id: str, model: str, ids: list[str], usage: Usage) -> None:
        self.usage = usage
        self.choices = [Choice(index) for index in range(len(ids))]
        self._of = dict(zip(ids, self.choices, strict=True))
        self._shape = shape
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def take_in(self, update: Update) -> Choice:
        choice = self._of[update.request_id]
        self.usage.completion_tokens += len(update.tokens)
        if update.cached_tokens is not None and not choice.boarded:  # a preempted completion boards again
            choice.boarded = True
            # Completions of the same prompt share it; what was cached is told once, by the first of them.
            if "#" not in update.request_id:
                self.usage.cached_tokens += update.cached_tokens
        return choice

    def body(self, tokenizer: Tokenizer) -> dict[str, Any]:
        choices = [self._shape.choice(choice, tokenizer) for choice in self.choices]
        return {**self._head, "object": self._shape.object, "choices": choices, "usage": self.usage.body()}

    def chunk(self, choice: Choice, update: Update, tokenizer: Tokenizer, *, with_usage: bool) -> dict[str, Any]:
        delta = self._shape.delta(choice, update, tokenizer)
        choice.started = True
        chunk = {**self._head, "object": self._shape.stream_object, "choices": [delta]}
        return chunk | {"usage": self.usage.body()} if with_usage else chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self._shape.stream_object, "choices": [], "usage": self.usage.body()}
