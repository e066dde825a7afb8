"""Responses of the chat completions and completions endpoints, built from the engine's updates, and log-probabilities
in the formats of all endpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from chairlift.core.plan import TokenLogprobs
from chairlift.server.generation.endpoint import ResponseBuilder
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.types import ChatRequest, CompletionBody, StreamOptions
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantParser,
    AssistantPart,
    CallBegun,
    ContentDelta,
    ReasoningDelta,
)
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool_use import ToolUse

_json = msgspec.json.Encoder()


# ---- log-probabilities: a token may be part of a character, so its text is derived from its bytes ------------------


def token_text(data: bytes) -> str:
    """Decode a token's bytes, or escape them as in `\\xf0\\x9f` if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the logprobs of a chat completion or a response: one object per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    return [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]} for item in logprobs
    ]


def prompt_logprobs(logprobs: list[TokenLogprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt in vLLM's format: objects by token id, none for the first token."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer.token_bytes(token))}

    def entries(item: TokenLogprobs) -> dict[str, Any]:
        found = {
            str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top[:top], start=1)
        }
        return {str(item.token_id): entry(item.token_id, item.logprob, item.rank)} | found

    return [None, *map(entries, logprobs)]


class CompletionLogprobs:
    """Log-probabilities of one text completion: parallel lists, with each token's offset in the text."""

    def __init__(self) -> None:
        self._length = 0
        self._detokenizer: IncrementalDetokenizer | None = None

    def add_echo(
        self, first_token: int, logprobs: list[TokenLogprobs], text: str, top: int, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the lists for an echoed prompt with this text; its first token has no log-probability.

        `top`: the number of alternatives to list.
        """
        first = TokenLogprobs(first_token, 0.0, 1, ())
        lists = self.add([first, *(replace(item, top=item.top[:top]) for item in logprobs)], tokenizer)
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._length, self._detokenizer = len(text), None
        return lists

    def add(self, logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the lists for the next tokens of the completion."""
        self._detokenizer = self._detokenizer or tokenizer.detokenizer()
        offsets = []
        for item in logprobs:
            offsets.append(self._length)
            # A character of several tokens counts for the last of them.
            self._length += len(self._detokenizer.push(item.token_id))
        return {
            "tokens": [_key(tokenizer.token_bytes(item.token_id)) for item in logprobs],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [_top(item, tokenizer) for item in logprobs],
            "text_offset": offsets,
        }


def _top(item: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the top log-probabilities and that of the token itself by text. Of tokens with the same text (a special
    token and its spelling), the token itself or else the most probable one is kept."""
    top = {_key(tokenizer.token_bytes(item.token_id)): item.logprob}
    for token, logprob in item.top:  # The order is that of probability.
        top.setdefault(_key(tokenizer.token_bytes(token)), logprob)
    return top


def _key(data: bytes) -> str:
    text = token_text(data)
    return text if text.encode() == data else f"bytes:{text}"


# ---- choices ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Choice:
    """One completion, possibly incomplete."""

    index: int
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    started: bool = False  # whether a chunk was streamed
    completion_logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # shared by all choices of a prompt

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, update: Update) -> None:
        self.prompt_logprobs += update.prompt_logprobs
        self.parts.append(update.text)
        self.logprobs += update.logprobs
        self.finish_reason = update.finish_reason
        self.stop_reason = update.stop_reason
        self.score = update.score


@dataclass(slots=True)
class ChatChoiceFormat:
    """The JSON of the choices of /v1/chat/completions: whole ones, and the chunks that are streamed for an update."""

    with_logprobs: bool
    echo: str = ""  # the text that the answer continues, if it is to be repeated
    object: str = "chat.completion"
    stream_object: str = "chat.completion.chunk"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": self.echo + choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs, tokenizer),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        delta = self.delta(choice, {"content": update.text} if update.text else {}) | {
            "logprobs": self.logprobs(update.logprobs, tokenizer),
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        return [*self.first_deltas(choice), delta]

    def first_deltas(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the chunk that starts a choice: the role with no generated content, as clients expect."""
        return [] if choice.started else [self.delta(choice, {"role": "assistant", "content": self.echo})]

    @staticmethod
    def delta(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def add_prompt_logprobs(self, body: dict[str, Any], prompts: list[Any]) -> None:
        body["prompt_logprobs"] = prompts[0]

    def logprobs(self, logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": chat_logprobs(logprobs, tokenizer), "refusal": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a text completion begins with; empty if it was not requested."""

    text: str = ""
    first_token: int | None = None  # if the prompt is scored


@dataclass(slots=True)
class TextChoiceFormat:
    """The JSON of the choices of /v1/completions."""

    top_logprobs: int | None  # alternatives of each token; None: no logprobs
    echoes: list[Echo]  # One for each choice.
    object: str = "text_completion"
    stream_object: str = "text_completion"

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        return self._body(choice, choice.text, choice.logprobs, choice, tokenizer)

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        return [self._body(choice, update.text, update.logprobs, update, tokenizer)]

    def add_prompt_logprobs(self, body: dict[str, Any], prompts: list[Any]) -> None:
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt

    def _body(
        self, choice: Choice, text: str, logprobs: list[TokenLogprobs], end: Choice | Update, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        echo = Echo() if choice.started else self.echoes[choice.index]
        return {
            "index": choice.index,
            "text": echo.text + text,
            "logprobs": self._logprobs(choice, echo, logprobs, tokenizer),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _logprobs(
        self, choice: Choice, echo: Echo, logprobs: list[TokenLogprobs], tokenizer: Tokenizer
    ) -> dict[str, list[Any]] | None:
        if self.top_logprobs is None:
            return None
        lists = choice.completion_logprobs
        if echo.first_token is None:
            return lists.add(logprobs, tokenizer)
        prompt = lists.add_echo(echo.first_token, choice.prompt_logprobs, echo.text, self.top_logprobs, tokenizer)
        output = lists.add(logprobs, tokenizer)
        return {name: prompt[name] + output[name] for name in prompt}


class CompletionResponseBuilder(ResponseBuilder):
    """Builds the response to a chat or text completion."""

    def __init__(
        self,
        choice_format: ChatChoiceFormat | TextChoiceFormat,
        model: ServedModel,
        body: CompletionBody,
        response_id: str,
        completion_ids: list[str],
        usage: Usage,
    ) -> None:
        self.usage = usage
        prompts: dict[str, list[TokenLogprobs]] = {}  # the first completion of each prompt gets its log-probabilities
        self._choices = {
            one_id: Choice(index, prompt_logprobs=prompts.setdefault(one_id.partition("#")[0], []))
            for index, one_id in enumerate(completion_ids)
        }
        self._prompt_logprobs = body.prompt_logprobs
        self._format = choice_format
        self._tokenizer = model.tokenizer
        options = body.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._continuous_usage = self._include_usage and bool(options.continuous_usage_stats)
        self._head = {
            "id": response_id,
            "created": int(time.time()),
            "model": model.names[0],
            "system_fingerprint": model.fingerprint,
        }
        if isinstance(body, ChatRequest) and body.service_tier is not None:
            self._head["service_tier"] = body.service_tier

    def add(self, update: Update) -> None:
        self._choices[update.request_id].add(update)

    def body(self) -> dict[str, Any]:
        choices = [
            self._format.choice(choice, self._tokenizer) | ({} if choice.score is None else {"score": choice.score})
            for choice in self._choices.values()
        ]
        body = {**self._head, "object": self._format.object, "choices": choices, "usage": self.usage.body()}
        top = self._prompt_logprobs  # The field is null without it, as in vLLM.
        scored = [choice.prompt_logprobs for choice in self._choices.values()]
        self._format.add_prompt_logprobs(
            body, [None if top is None else prompt_logprobs(one, top, self._tokenizer) for one in scored]
        )
        return body

    def events(self, update: Update) -> list[bytes]:
        choice = self._choices[update.request_id]
        choice.prompt_logprobs += update.prompt_logprobs
        if not (update.tokens or update.text or update.finish_reason):
            return []
        deltas = self._format.deltas(choice, update, self._tokenizer)
        choice.started = True
        return [self._chunk([delta], self._usage_so_far(delta, update)) for delta in deltas]

    def end_events(self) -> list[bytes]:
        return [*([self._chunk([], self.usage.body())] if self._include_usage else []), b"data: [DONE]\n\n"]

    def error_events(self, error: APIError) -> list[bytes]:
        return [_event(error.body), b"data: [DONE]\n\n"]

    def _usage_so_far(self, delta: dict[str, Any], update: Update) -> dict[str, Any] | None:
        """Return the usage that a chunk reports; the chunk with the role is before the tokens of its update."""
        if not self._continuous_usage:
            return None
        begins = "role" in delta.get("delta", ())
        return self.usage.body(without=len(update.tokens) if begins else 0)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._head, "object": self._format.stream_object, "choices": choices}
        return _event(chunk | {"usage": usage} if self._include_usage else chunk)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(body) + b"\n\n"


class ParsedChoiceFormat(ChatChoiceFormat):
    """Chat choices with reasoning or tool calls. Log-probabilities include the tokens of both."""

    def __init__(
        self,
        with_logprobs: bool,
        tools: ToolUse,
        new_parser: Callable[[], AssistantParser],
        *,
        echo: str = "",
        include_reasoning: bool = True,
    ) -> None:
        super().__init__(with_logprobs, echo)
        self._tools = tools
        self._new_parser = new_parser
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, AssistantParser] = {}  # parsers of streamed choices, by index
        self._called: set[int] = set()  # indices of choices with a call

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        parser = self._new_parser()
        parts = self._shown(parser.push(choice.text) + parser.close())
        content, calls = join_parts(parts)
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
        content = self.echo + content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        if calls or reasoning:
            message["content"] = content or None
        reason = self._tools.finish_reason(choice.finish_reason, bool(calls))
        return super().choice(choice, tokenizer) | {"message": message, "finish_reason": reason}

    def _shown(self, parts: list[AssistantPart]) -> list[AssistantPart]:
        return [part for part in parts if self._include_reasoning or not isinstance(part, ReasoningDelta)]

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Return one chunk per part. An update may have several parts, or none while the parser holds text back."""
        parser = self._parsers.get(choice.index) or self._parsers.setdefault(choice.index, self._new_parser())
        parts = parser.push(update.text)
        if update.finish_reason is not None:
            parts += parser.close()
        parts = self._shown(parts)
        if any(isinstance(part, CallBegun) for part in parts):
            self._called.add(choice.index)
        deltas = [_delta(part) for part in parts]
        if update.finish_reason is not None or (self.with_logprobs and update.logprobs and not deltas):
            deltas.append({})
        chunks = [self.delta(choice, delta) for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = self.logprobs(update.logprobs, tokenizer)
            chunks[-1]["finish_reason"] = self._tools.finish_reason(update.finish_reason, choice.index in self._called)
            chunks[-1]["stop_reason"] = update.stop_reason
        return [*self.first_deltas(choice), *chunks]


def join_parts(parts: list[AssistantPart]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the tool calls of a whole message."""
    content = "".join(part.text for part in parts if isinstance(part, ContentDelta))
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ArgumentsDelta):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    calls = [part for part in parts if isinstance(part, CallBegun)]
    return content, [_call(call, arguments.get(call.index, "")) for call in calls]


def _call(call: CallBegun, arguments: str) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _delta(part: AssistantPart) -> dict[str, Any]:
    match part:
        case ReasoningDelta(text=text):
            return {"reasoning_content": text, "reasoning": text}
        case ContentDelta(text=text):
            return {"content": text}
        case CallBegun(index=index):
            return {"tool_calls": [{"index": index, **_call(part, "")}]}
        case ArgumentsDelta(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
