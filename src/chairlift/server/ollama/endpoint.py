"""POST /api/chat, /api/generate, /api/embed and /api/embeddings: the equivalents of OpenAI's endpoints with Ollama's
bodies, and with responses that are streamed as lines of JSON."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.datastructures import State

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, Tokenized, parse_at, renamed_parameter
from chairlift.server.generation.reply import Event, PartsBuilder
from chairlift.server.generation.usage import Timeline, Usage
from chairlift.server.ollama.errors import ollama_error
from chairlift.server.ollama.types import (
    CHAT_NAMES,
    EmbedRequest,
    GenerateRequest,
    OldEmbeddingRequest,
    OllamaChatRequest,
    OllamaGenerationBody,
)
from chairlift.server.openai.chat import ChatGeneration, ChatPrompt
from chairlift.server.openai.pooling import EmbeddingGeneration, EmbeddingRequest, check_texts
from chairlift.server.openai.response_builder import chat_logprobs
from chairlift.server.openai.types import check_token_ids, check_unicode
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.assistant_parts import ArgumentsDelta, AssistantPart, CallBegun, ContentDelta, ReasoningDelta
from chairlift.text.fill_in_middle import encode_fill_in_middle
from chairlift.text.reasoning import ReasoningUse
from chairlift.text.tools.tool import Calling, ToolChoice
from chairlift.text.tools.tool_use import ToolUse

NANOSECONDS = 1_000_000_000
_SHARED = ("model", "timeout", "cache_salt", "priority", "targets", "user")

_encode = msgspec.json.Encoder().encode


class OllamaGeneration(GenerationRequest):
    """What the requests to /api/chat and /api/generate share."""

    id_prefix = "ollama-"

    body: OllamaGenerationBody

    def __init__(self, body: OllamaChatRequest | GenerateRequest, model: ServedModel, state: State) -> None:
        chat = body.as_chat(reasons=model.reasoning_format is not None)
        self.arrived: float = state.arrived
        self.timelines: Mapping[str, Timeline] = state.timelines
        try:
            self.chat = ChatGeneration(chat, model, chat.params(model))
        except InvalidParameter as error:
            raise self.rename_error(error) from None
        super().__init__(body, model, self.chat.params, streams=body.streams, prompt_parameter="messages")

    def encode(self, max_tokens: int) -> ChatPrompt:
        raise NotImplementedError

    def new_builder(self, prompt: ChatPrompt, completion_id: str, usage: Usage) -> OllamaBuilder:
        raise NotImplementedError

    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the prompt. If the context has no room for all of `num_predict`, the output may fill it."""
        prompt = self.encode(max_tokens)
        params, room = prompt.params, max(max_tokens - len(prompt.tokens), 1)
        if params.max_tokens is not None:
            params = params.clone(max_tokens=min(params.max_tokens, room))

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> OllamaBuilder:
            return self.new_builder(prompt, completion_ids[0], usage)

        return Tokenized([prompt.tokens], params, reply, prompt.reasoning, prompt.images)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(renamed_parameter(error.parameter, CHAT_NAMES))


class OllamaChat(OllamaGeneration):
    body: OllamaChatRequest

    def encode(self, max_tokens: int) -> ChatPrompt:
        _ = self.chat.tools  # validates tools before the messages
        messages = self.chat.body.messages
        last = messages[-1]
        continues = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
        return self.chat.encode(messages, max_tokens, continue_final=continues)

    def new_builder(self, prompt: ChatPrompt, completion_id: str, usage: Usage) -> OllamaBuilder:
        return ChatBuilder(self, prompt, completion_id, usage)


class Generate(OllamaGeneration):
    body: GenerateRequest

    def encode(self, max_tokens: int) -> ChatPrompt:
        body, tokenizer = self.body, self.model.tokenizer
        if not (body.raw or body.suffix) and tokenizer.chat_template is not None:
            prompt = self.chat.encode(self.chat.body.messages, max_tokens)
            return self._after_context(prompt, body.context) if body.context else prompt
        if body.system:
            reason = "raw" if body.raw else "suffix" if body.suffix else "a model that has no chat template"
            raise InvalidParameter("system", f"does not go with {reason}: nothing would show it to the model")
        text = body.prompt or ""
        check_unicode("prompt", [text])
        if body.suffix:
            check_unicode("suffix", [body.suffix])
            tokens = encode_fill_in_middle(tokenizer, text, body.suffix, max_tokens=max_tokens)
        else:
            tokens = tokenizer.encode(text, max_tokens=max_tokens, add_special_tokens=not body.context)
            tokens = [*check_token_ids("context", body.context or []), *tokens]
        tools = ToolUse(self.model.tool_format, (), ToolChoice(Calling.NONE))
        return ChatPrompt(tokens, self.params, tools, ReasoningUse(None, tokenizer), is_plain=True)

    def _after_context(self, prompt: ChatPrompt, context: list[int]) -> ChatPrompt:
        first = self.model.tokenizer.first_ids
        turn = prompt.tokens[len(first) :] if prompt.tokens[: len(first)] == first else prompt.tokens
        tokens = [*check_token_ids("context", context), *turn]
        return ChatPrompt(tokens, prompt.params, prompt.tools, prompt.reasoning, prompt.is_plain)

    def new_builder(self, prompt: ChatPrompt, completion_id: str, usage: Usage) -> OllamaBuilder:
        return GenerateBuilder(self, prompt, completion_id, usage)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(renamed_parameter(error.parameter, {**CHAT_NAMES, r"messages.*": "prompt"}))


# ---- responses -------------------------------------------------------------------------------------------------------


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded_response(model: str, *, is_chat: bool) -> dict[str, Any]:
    """Return the response to a request without a prompt, which loads the model."""
    shown: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now(), **shown, "done": True, "done_reason": "load"}


def call_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; text that is no JSON object, which only a cut call has, is passed on as such."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"_invalid_json": text}


class OllamaBuilder(PartsBuilder):
    """Builds a response of chunks, each of which is a line of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, request: OllamaGeneration, prompt: ChatPrompt, completion_id: str, usage: Usage) -> None:
        super().__init__(prompt.parser(), usage)
        self.request = request
        self.tokens = prompt.tokens
        self._completion_id = completion_id
        self._name = request.body.model or request.model.name
        self._logprobs: list[dict[str, Any]] | None = [] if request.chat.body.logprobs else None
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._call: CallBegun | None = None  # the call whose arguments arrive
        self._arguments: list[str] = []
        self._reason: str | None = None

    def shown(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> Event:
        """Return the fields with this output."""
        raise NotImplementedError

    def body(self) -> Event:
        output = self.shown("".join(self._texts), "".join(self._thoughts), self._calls)
        logprobs = {} if self._logprobs is None else {"logprobs": self._logprobs}
        return self._head() | output | logprobs | self.ending()

    def first_events(self) -> list[Event]:
        return []

    def update_events(self, update: Update) -> Iterator[Event]:
        events = [*super().update_events(update)]
        if self._logprobs is not None and update.logprobs:
            found = chat_logprobs(update.logprobs, self.request.model.tokenizer)
            self._logprobs += found
            events = events or [self._chunk()]
            events[0] = {"logprobs": found} | events[0]  # `done` stays the last field, by which proxies know the end.
        yield from events

    def part_events(self, part: AssistantPart) -> Iterator[Event]:
        if isinstance(part, ArgumentsDelta):
            self._arguments.append(part.text)
            return
        yield from self._end_call()
        match part:
            case ReasoningDelta(text=text):
                self._thoughts.append(text)
                yield self._chunk(thinking=text)
            case ContentDelta(text=text):
                self._texts.append(text)
                yield self._chunk(text)
            case CallBegun():
                self._call = part

    def last_events(self, update: Update) -> Iterator[Event]:
        yield from self._end_call()
        self._reason = "length" if update.finish_reason == "length" else "stop"

    def end_events(self) -> list[bytes]:
        return [self.encode(self._head() | self.shown("", "", []) | self.ending())]

    def error_events(self, error: APIError) -> list[bytes]:
        return [self.encode(ollama_error(error.status_code, error.body, ""))]

    def ping(self) -> bytes:
        """Return a chunk without output: every line must be one."""
        return self.encode(self._chunk())

    def encode(self, event: Event) -> bytes:
        self.num_encoded += 1
        return _encode(event) + b"\n"

    def ending(self) -> Event:
        """Return the fields of the last chunk. The time to load is that in the queue, since the model is loaded."""
        line = self.request.timelines.get(self._completion_id) or Timeline(self.request.arrived)
        usage, total = self.usage, time.monotonic() - self.request.arrived
        return {
            "done": True,
            "done_reason": self._reason or "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": _nanoseconds(line.seconds("queue")),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(line.seconds("prefill")),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(line.seconds("decode")),
        }

    def _end_call(self) -> Iterator[Event]:
        if self._call is None:
            return
        arguments = call_arguments("".join(self._arguments))
        function = {"index": self._call.index, "name": self._call.name, "arguments": arguments}
        self._calls.append({"id": self._call.call_id, "function": function})
        self._call, self._arguments = None, []
        yield self._chunk(calls=self._calls[-1:])

    def _chunk(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> Event:
        return self._head() | self.shown(text, thinking, calls or []) | {"done": False}

    def _head(self) -> Event:
        return {"model": self._name, "created_at": now()}


def _nanoseconds(seconds: float) -> int:
    """Return at least 1: clients divide by it."""
    return max(int(NANOSECONDS * seconds), 1)


class ChatBuilder(OllamaBuilder):
    def shown(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> Event:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateBuilder(OllamaBuilder):
    """The last chunk has the tokens of the prompt and of the output, as the `context` of a further request."""

    def __init__(self, request: Generate, prompt: ChatPrompt, completion_id: str, usage: Usage) -> None:
        super().__init__(request, prompt, completion_id, usage)
        self._context = None if request.body.raw or request.body.suffix else [*prompt.tokens]

    def update_events(self, update: Update) -> Iterator[Event]:
        if self._context is not None:
            self._context += update.tokens
        yield from super().update_events(update)

    def shown(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> Event:
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def ending(self) -> Event:
        return super().ending() | ({} if self._context is None else {"context": self._context})


# ---- embeddings ------------------------------------------------------------------------------------------------------


class OllamaEmbedding(EmbeddingGeneration):
    """POST /api/embed, and /api/embeddings, whose vectors are not normalised."""

    def __init__(self, body: EmbedRequest | OldEmbeddingRequest, model: ServedModel, state: State) -> None:
        body.name_ignored()
        self._given = body
        self._arrived: float = state.arrived
        fields = {name: getattr(body, name) for name in _SHARED}
        if isinstance(body, EmbedRequest):
            fields |= {"input": body.input, "dimensions": body.dimensions}
        else:
            fields |= {"input": body.prompt, "normalize": False}
        super().__init__(parse_at("", EmbeddingRequest, fields), model)

    def _encode(self, text: str | list[int], max_tokens: int) -> list[int]:
        """A text that is too long is cut, unless `truncate` is false. It keeps the special tokens at its end, whose
        vector may be that of the text."""
        assert isinstance(text, str)
        check_texts(self._name, [text])
        tokenizer = self.model.tokenizer
        if isinstance(self._given, EmbedRequest) and self._given.truncate is False:
            return tokenizer.encode(text, max_tokens=max_tokens)
        tokens = tokenizer.encode(text)
        if len(tokens) <= max_tokens:
            return tokens
        plain = tokenizer.encode(text, add_special_tokens=False)
        last = tokens[len(tokenizer.first_ids) + len(plain) :]
        return tokens[: max_tokens - len(last)] + last

    @property
    def _name(self) -> str:
        return "input" if isinstance(self._given, EmbedRequest) else "prompt"

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(renamed_parameter(error.parameter, {"input|prompt": self._name}))

    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        shown = [array("f", vector).tolist() for vector in vectors]
        return embeddings_response(self._given, shown, usage["prompt_tokens"], self.model.name, self._arrived)


def embeddings_response(
    body: EmbedRequest | OldEmbeddingRequest, vectors: list[list[float]], num_tokens: int, name: str, arrived: float
) -> dict[str, Any]:
    if isinstance(body, OldEmbeddingRequest):
        return {"embedding": vectors[0] if vectors else []}
    return {
        "model": body.model or name,
        "embeddings": vectors,
        "total_duration": _nanoseconds(time.monotonic() - arrived),
        "load_duration": _nanoseconds(0.0),
        "prompt_eval_count": num_tokens,
    }
