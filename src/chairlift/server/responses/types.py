"""The request body of /v1/responses, and its translation to a chat completion request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.http.unknown_fields import without_unknown
from chairlift.server.openai.strict import StrictModel, max_entries, parse_at
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, Effort, GenerationBody, Tools

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"

_STATELESS = "nothing is kept between requests; send all earlier items in input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "prompts are not kept here; send the text as instructions and input",
    "max_tool_calls": "only limits tools that run in the server, and there are none",
    "context_management": "is not supported; send the input that the model should see",
}
_PLACEHOLDER_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": ""}]


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None  # OpenAI's default


class Reasoning(StrictModel):
    """The effort goes to the chat template. There are no summaries: reasoning is returned as it is."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # "auto" is whatever the model offers
    generate_summary: None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None
    include_usage: Literal[True] | None = None  # sent by aiperf; the last event always has the usage


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Label = Annotated[str | None, Field(max_length=512)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(GenerationBody):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted only with the values that this server implements: it is stateless, synchronous and never truncates.
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Labels that the response repeats. Prefixes are shared by content, so prompt_cache_key has no effect.
    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA), max_entries(MAX_METADATA)] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    # Declared to be refused with a reason instead of as unknown parameters.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    context_management: Any = None

    @property
    def with_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or [])

    @property
    def text_format(self) -> dict[str, Any]:
        return {"type": "text"} if self.text is None or self.text.format is None else self.text.format

    def check(self) -> None:
        """Refuse unsupported parameters and combinations."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise InvalidParameter(name, reason)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "only goes with stream: true")

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion request. Messages are added after admission."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        given = dict(
            **shared,
            **self._extra_args,
            messages=_PLACEHOLDER_MESSAGES,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.with_logprobs or None,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=_response_format(self.text_format),
            tools=[_chat_tool(i, tool) for i, tool in enumerate(self.tools or [])] or None,
            tool_choice=_chat_tool_choice(self.tool_choice, bool(self.tools)),
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
        )
        return parse_at("", ChatRequest, given)


def _response_format(given: dict[str, Any]) -> Any:
    """Convert {type, name, schema, strict} to {type, json_schema: {name, schema, strict}}."""
    given = without_unknown("text.format", given, ("type", "name", "description", "schema", "strict"))
    if given == {"type": "text"}:
        return None
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _chat_tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Convert {type, name, parameters} to {type, function: {name, parameters}}."""
    kind = tool.get("type")
    if kind != "function":
        problem = f"only function tools are supported: this server runs no tools itself, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"tools[{index}].type", problem)
    known = without_unknown(f"tools[{index}]", tool, ("type", "name", "description", "parameters", "strict"))
    return {"type": "function", "function": {name: value for name, value in known.items() if name != "type"}}


def _chat_tool_choice(choice: str | dict[str, Any] | None, has_tools: bool) -> Any:
    if not isinstance(choice, dict):
        return None if choice == "auto" and not has_tools else choice  # some clients always send "auto"
    kind = choice.get("type")
    if kind != "function":
        problem = f"must be none, auto, required or one function, got {str(kind)[:40]!r}"
        raise InvalidParameter("tool_choice.type", problem)
    known = without_unknown("tool_choice", choice, ("type", "name"))
    return {"type": "function", "function": {name: value for name, value in known.items() if name != "type"}}
