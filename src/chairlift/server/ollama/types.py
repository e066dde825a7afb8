"""The request bodies of Ollama's API, and their translation to chat completion requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import (
    EngineBody,
    Entries,
    RequestBody,
    StrictModel,
    parse_at,
    renamed_parameter,
)
from chairlift.server.llamacpp.sampling import LlamaSampling, Whole
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, TokenIds, Tools
from chairlift.server.wire.unknown_fields import say_ignored
from chairlift.text.images import image_mark

# Prefixes of chat parameters, and this API's names for them.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
CHAT_NAMES = {
    r"response_format(\.json_schema)?(\.schema)?": "format",
    r"reasoning_effort": "think",
    r"(top_)?logprobs": "top_logprobs",
    r"max_(completion_)?tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    rf"({'|'.join(_SAMPLING)})": r"options.\1",
}
_EFFORTS = {True: "medium", False: "none", "max": "xhigh"}
# Fields that say how a model is loaded, which this server does at its start.
_LOADING = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "penalize_newline"),
)


class Options(LlamaSampling):
    """The options of a request; those that are about loading have no effect."""

    num_predict: Whole | None = None
    num_ctx: Whole | None = None
    num_keep: Whole | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    num_thread: Whole | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    penalize_newline: bool | None = None

    @property
    def limit(self) -> int | None:
        """The tokens to generate; None, for 0 and less or none: as many as fit."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    def name_ignored(self) -> None:
        for name in _LOADING:
            if getattr(self, name) is not None:
                say_ignored(f"options.{name}")


class OllamaBody(EngineBody):
    """What all bodies with a model share."""

    options: Options | None = None
    keep_alive: str | float | None = None  # The model is never unloaded.

    def name_ignored(self) -> None:
        """Name the fields without an effect."""
        if self.keep_alive is not None:
            say_ignored("keep_alive")
        (self.options or Options()).name_ignored()


class OllamaGenerationBody(OllamaBody):
    """What /api/chat and /api/generate share."""

    stream: bool | None = None  # It is true by default.
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    truncate: bool | None = None  # A prompt that is too long is refused.
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def fields(self, *, reasons: bool) -> dict[str, Any]:
        """Return the parameters of the equivalent chat completion request, without messages, for a model that `reasons`
        or does not."""
        self.name_ignored()
        for name in ("truncate", "shift"):
            if getattr(self, name):
                say_ignored(name)
        found: dict[str, Any] = (self.options or Options()).sampling("options")
        if self.think and not reasons:
            say_ignored("think")
        if self.think is not None and reasons:
            found["reasoning_effort"] = _EFFORTS.get(self.think, self.think)
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        shared = ("model", "timeout", "cache_salt", "priority", "targets", "user", "top_logprobs")
        found |= {name: getattr(self, name) for name in shared}
        limit = self.options.limit if self.options else None
        logprobs = self.logprobs or self.top_logprobs is not None
        return found | {"max_completion_tokens": limit, "logprobs": logprobs or None}


class CalledFunction(StrictModel):
    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class OllamaCall(StrictModel):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(StrictModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Entries[Any] | None = None
    tool_calls: Entries[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaGenerationBody):
    messages: Annotated[list[OllamaMessage] | None, Field(fail_fast=True, max_length=MAX_MESSAGES)] = None
    tools: Tools | None = None

    def as_chat(self, *, reasons: bool) -> ChatRequest:
        tools = {"tools": self.tools} if self.tools else {}
        return chat_request({**self.fields(reasons=reasons), **tools, "messages": chat_messages(self.messages or ())})


class GenerateRequest(OllamaGenerationBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    images: Entries[Any] | None = None
    context: TokenIds | None = None

    def as_chat(self, *, reasons: bool) -> ChatRequest:
        """Return the equivalent request; its messages are not used if the prompt is not written by the template."""
        if self.template:
            raise InvalidParameter("template", "is not supported: start the server with --chat-template FILE")
        if self.suffix and self.context:
            raise InvalidParameter("context", "does not go with suffix")
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": with_images("images", self.prompt or "", self.images)}]
        return chat_request({**self.fields(reasons=reasons), "messages": messages})


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """Validate a chat completion request; errors have the names of this API."""
    try:
        return parse_at("", ChatRequest, fields)
    except InvalidParameter as error:
        raise error.renamed(renamed_parameter(error.parameter, CHAT_NAMES)) from None


def chat_messages(given: Iterable[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's form. Calls without an id get one, and so do their results: by the name of the
    tool if they have one, else in order."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # the ids and names of calls without a result
    for index, message in enumerate(given):
        content = with_images(f"messages[{index}].images", message.content or "", message.images)
        written: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            written["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [_call(call, f"call{index:03}{number:02}") for number, call in enumerate(message.tool_calls)]
            waiting += [(call["id"], call["function"]["name"]) for call in calls]
            written["tool_calls"] = calls
        if message.role == "tool":
            call_id, name = _answered(message, waiting)
            written["tool_call_id"] = call_id
            if name:
                written["name"] = name
        found.append(written)
    return found


def with_images(location: str, text: str, images: list[Any] | None) -> str:
    """A message with marks for its images, which come first."""
    marks = []
    for index, image in enumerate(images or ()):
        if not isinstance(image, str):
            raise InvalidParameter(f"{location}[{index}]", "must be an image in base64")
        marks.append(image_mark(location, f"data:;base64,{image}"))
    return "\n".join([*marks, text] if text or not marks else marks)


def _answered(message: OllamaMessage, waiting: list[tuple[str, str]]) -> tuple[str, str | None]:
    """Return the id and the name of the call whose result a message is; it no longer waits."""
    given_id, given_name = message.tool_call_id, message.tool_name
    if given_id is not None:
        found = next((call for call in waiting if call[0] == given_id), None)
    else:
        found = next((call for call in waiting if call[1] == given_name), waiting[0] if waiting else None)
    if found is not None:
        waiting.remove(found)
    call_id, name = found or ("call00000", None)
    return given_id or call_id, given_name or name


def _call(call: OllamaCall, new_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call.id or new_id, "type": "function", "function": function}


Texts = str | Annotated[list[str], Field(fail_fast=True, max_length=2048)]


class EmbedRequest(OllamaBody):
    input: Texts | None = None
    truncate: bool | None = None  # It is true by default.
    dimensions: Whole | None = None


class OldEmbeddingRequest(OllamaBody):
    """The body of /api/embeddings, which was before /api/embed."""

    prompt: str | None = None


class NamedModel(RequestBody):
    """A body that names a model."""

    model: str | None = None
    name: str | None = None  # the earlier name of `model`
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None

    @property
    def given(self) -> str | None:
        return self.model or self.name
