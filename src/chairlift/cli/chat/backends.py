"""Backends of a chat: a model in this process, or a server."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.client.blocking import BlockingClient
from chairlift.terminal.answer_meter import AnswerMeter, answer_summary
from chairlift.terminal.interrupt import InterruptBetweenSteps
from chairlift.terminal.options import SamplingOptions

if TYPE_CHECKING:
    from chairlift.llm import LLM

Messages = Sequence[Mapping[str, str]]


class ChatBackend(Protocol):
    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Yield pieces of text as they arrive. Ctrl-C raises KeyboardInterrupt between two pieces."""
        ...

    def summary(self) -> str:
        """Return one line with the speed and lengths of the last answer."""
        ...


class LocalChat:
    """Runs a model in this process."""

    def __init__(self, llm: LLM, sampling: SamplingOptions) -> None:
        self._llm = llm
        self._params = sampling.params()
        self._meter = AnswerMeter()
        self._interrupt = InterruptBetweenSteps()
        llm.engine.subscribe(self._meter)
        llm.engine.subscribe(self._interrupt)

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        with self._interrupt.armed():
            for piece in self._llm.stream_chat(messages, self._params):
                yield piece.text
        self._meter.check()

    def summary(self) -> str:
        return self._meter.summary()


class RemoteChat:
    """Calls an OpenAI-compatible server."""

    def __init__(self, client: BlockingClient, model: str, sampling: Mapping[str, Any]) -> None:
        """`sampling` are the parameters to send; the server decides about the others."""
        self._client = client
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._fields |= sampling
        self._sent_at = 0.0
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        self._sent_at, self._times, self._usage, self._finish_reason = time.monotonic(), [], {}, None
        for event in self._client.stream("/v1/chat/completions", {**self._fields, "messages": list(messages)}):
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                text = (choice.get("delta") or {}).get("content")
                if text:
                    self._times.append(time.monotonic())
                    yield text

    def summary(self) -> str:
        details = self._usage.get("prompt_tokens_details") or {}
        return answer_summary(
            self._sent_at,
            self._times,
            self._usage.get("completion_tokens") or len(self._times),
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens") or 0,
            cut_off=self._finish_reason == "length",
        )
