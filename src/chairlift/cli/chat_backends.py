"""What answers a conversation: a model in this process, or a server."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.client.blocking import BlockingClient, ServerError
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options import options_of
from chairlift.terminal.answers import AnswerMeter, InterruptBetweenSteps, answer_summary, limit_reached
from chairlift.terminal.options import ChatSampling, SamplingOptions
from chairlift.text.assistant_parts import AssistantPart, ContentDelta, PlainParser, ReasoningDelta

if TYPE_CHECKING:
    from chairlift.llm import LLM

Messages = Sequence[Mapping[str, str]]
Answer = Generator[AssistantPart, None, None]

# The tokens of an answer where nothing sets them: small models may never end one. A model that reasons needs the room.
MAX_ANSWER, MAX_COMPLETION = 1024, 256


class ChatBackend(Protocol):
    model: str
    knows_defaults: bool  # false where a server has others

    def defaults(self, preset: str | None) -> SamplingOptions:
        """Return what applies where nothing else is set; raises for an unknown preset."""
        ...

    def answer(self, messages: Messages, changed: Mapping[str, Any], *, reasons: bool) -> Answer:
        """Yield the parts of the answer as they arrive. Ctrl-C raises KeyboardInterrupt between two parts.

        `changed` are the sampling parameters that differ from the defaults. Without `reasons`, the model is told not to
        reason.
        """
        ...

    def answer_limit(self, *, reasons: bool) -> int | None:
        """Return the most tokens of an answer where nothing sets them; None is what fits into the context."""
        ...

    @property
    def cut_off(self) -> str:
        """The limit that the last answer has reached, or nothing."""
        ...

    def summary(self) -> str:
        """Return one line with the speed and lengths of the last answer."""
        ...


class LocalChat:
    """Runs a model in this process. Without a chat template, it completes the last message."""

    knows_defaults = True

    def __init__(self, llm: LLM, model: str) -> None:
        self.model = model
        self._llm = llm
        self._meter = AnswerMeter()
        self._interrupt = InterruptBetweenSteps()
        llm.engine.subscribe(self._meter)
        llm.engine.subscribe(self._interrupt)

    def defaults(self, preset: str | None) -> SamplingOptions:
        sampling = self._llm.defaults.preset(preset).sampling
        known = {option.name for option in options_of(ChatSampling)}
        return ChatSampling(**{name: value for name, value in sampling.items() if name in known})

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._llm.get_tokenizer().chat_template is not None

    def answer_limit(self, *, reasons: bool) -> int | None:
        if not self.chats:
            return MAX_COMPLETION
        return None if reasons and self._llm.engine.reasoning_format is not None else MAX_ANSWER

    def answer(self, messages: Messages, changed: Mapping[str, Any], *, reasons: bool) -> Answer:
        from chairlift.text.reasoning import ReasoningUse, effort_variables  # imported late, like the tokenizer

        tokenizer, format_ = self._llm.get_tokenizer(), self._llm.engine.reasoning_format
        preset = changed.get("preset")
        given = {name: value for name, value in changed.items() if name != "preset"}
        sampling = {"max_tokens": None, **self._llm.defaults.preset(preset).sampling}
        params = SamplingParams.with_defaults(sampling, **given)
        if self.chats:
            try:
                variables = {} if reasons else effort_variables("none", format_, tokenizer)
            except InvalidParameter as error:
                raise error.renamed("reasoning") from None
            prompt: Any = self._llm.chat_format.prompt(messages, preset=preset, **variables)
            reasoning = ReasoningUse.after(prompt["prompt_token_ids"], format_, tokenizer)
            params = params.clone(visible_special_ids=tokenizer.special_ids_of(reasoning.markers))
            parser, limit = reasoning.parser(PlainParser()), None if reasoning.active else MAX_ANSWER
        else:
            prompt, parser, limit = messages[-1]["content"], PlainParser(), MAX_COMPLETION
        if params.max_tokens is None:
            params = params.clone(max_tokens=limit and max(limit, params.min_tokens))
        self._meter.max_tokens = params.max_tokens
        with self._interrupt.armed():
            for piece in self._llm.stream(prompt, params):
                yield from parser.push(piece.text)
            yield from parser.close()
        self._meter.check()

    @property
    def cut_off(self) -> str:
        return self._meter.cut_off

    def summary(self) -> str:
        return self._meter.summary()


class RemoteChat:
    """Calls an OpenAI-compatible server, which decides about the parameters that nothing sets."""

    knows_defaults = False

    def __init__(self, client: BlockingClient, model: str) -> None:
        self.model = model
        self._client = client
        self._sent_at = 0.0
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._max_tokens: int | None = None  # None is the server's

    def defaults(self, preset: str | None) -> SamplingOptions:
        return SamplingOptions()

    def answer_limit(self, *, reasons: bool) -> int | None:
        return None

    def answer(self, messages: Messages, changed: Mapping[str, Any], *, reasons: bool) -> Answer:
        self._sent_at, self._times, self._usage, self._finish_reason = time.monotonic(), [], {}, None
        self._max_tokens = changed.get("max_tokens")
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **changed}
        chat = body | {"messages": list(messages)} | ({} if reasons else {"reasoning_effort": "none"})
        try:
            yield from self._parts("/v1/chat/completions", chat)
        except ServerError as error:
            if "no chat template" not in str(error) or len(messages) > 1:
                raise
            yield from self._parts("/v1/completions", body | {"prompt": messages[0]["content"]})

    def _parts(self, path: str, body: Mapping[str, Any]) -> Answer:
        for event in self._client.stream(path, body):
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                text = delta.get("content") or choice.get("text")
                if thought or text:
                    self._times.append(time.monotonic())
                if thought:
                    yield ReasoningDelta(thought)
                if text:
                    yield ContentDelta(text)

    @property
    def cut_off(self) -> str:
        if self._finish_reason != "length":
            return ""
        if self._max_tokens is None:
            return "stopped at the server's max_tokens or the end of the context"
        return limit_reached(self._num_tokens, self._max_tokens)

    @property
    def _num_tokens(self) -> int:
        return self._usage.get("completion_tokens") or len(self._times)

    def summary(self) -> str:
        details = self._usage.get("prompt_tokens_details") or {}
        return answer_summary(
            self._sent_at,
            self._times,
            self._num_tokens,
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens") or 0,
            cut_off=self.cut_off,
        )
