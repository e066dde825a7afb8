"""The request bodies of /v1/responses and /v1/responses/compact, and their translation to a chat completion request."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Entries, RequestBody, StrictModel, Tier, max_entries
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, Effort, GenerationBody, Label, Tools
from chairlift.server.responses.input import NOTHING, Earlier
from chairlift.server.responses.tools import (
    ADDITIONAL_TOOLS,
    OfferedTools,
    check_encodable,
    located_tools,
)
from chairlift.server.wire.unknown_fields import without_unknown

MAX_METADATA = 16
MAX_ID = 100  # characters
LOGPROBS = "message.output_text.logprobs"

_REFUSED = {
    "prompt": "prompts are not kept here; send the text as instructions and input",
    "moderation": "this server does not moderate texts",
}


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    """The effort goes to the chat template. There are no summaries: reasoning is returned as it is."""

    effort: Effort | Literal["max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None
    include_usage: Literal[True] | None = None  # sent by aiperf; the last event always has the usage


# Those about tools that a server runs ask for nothing here, since their calls are never made.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


StoredId = Annotated[str | None, Field(max_length=MAX_ID)]


class ConversationReference(StrictModel):
    id: Annotated[str, Field(max_length=MAX_ID)]


class ResponsesRequest(GenerationBody):
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Entries[Included] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    store: bool | None = None  # The response says whether it is stored.
    # Limits only the calls of tools that a server runs, of which there are none.
    max_tool_calls: Annotated[int | None, Field(ge=1)] = None
    # Labels that the response repeats. Prefixes are shared by content, so those about caching have no effect.
    metadata: Annotated[Metadata | None, Field(max_length=MAX_METADATA), max_entries(MAX_METADATA)] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # Codex CLI sends it.
    # Has no effect until the context is full, and then the request is refused or shortened, as `truncation` says.
    context_management: Entries[dict[str, Any]] | None = None
    previous_response_id: StoredId = None
    conversation: StoredId | ConversationReference = None
    # Declared to be refused with a reason instead of as unknown parameters.
    prompt: Any = None
    moderation: Any = None
    _earlier: Earlier = PrivateAttr(default=NOTHING)

    def continue_from(self, earlier: Earlier) -> None:
        """Put the items that the server has kept before the input."""
        self._earlier = earlier

    @property
    def earlier(self) -> Earlier:
        return self._earlier

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationReference) else given

    @cached_property
    def offered_tools(self) -> OfferedTools:
        tools = located_tools("tools", self.tools or [])
        items = [(self._earlier.parameter, item) for item in self._earlier.items]
        items += [
            (f"input[{index}]", item) for index, item in enumerate([] if isinstance(self.input, str) else self.input)
        ]
        for location, item in items:
            if item.get("type") == ADDITIONAL_TOOLS:
                tools += located_tools(f"{location}.tools", item.get("tools"))
        return OfferedTools(tools, self.tool_choice)

    @property
    def with_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or [])

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def verbosity(self) -> str | None:
        return self.text.verbosity if self.text else None

    @cached_property
    def text_format(self) -> dict[str, Any]:
        given = {"type": "text"} if self.text is None or self.text.format is None else self.text.format
        return without_unknown("text.format", given, ("type", "name", "description", "schema", "strict"))

    def check(self) -> None:
        """Refuse unsupported parameters and combinations."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise InvalidParameter(name, reason)
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "only goes with stream: true")
        if self.previous_response_id is not None and self.conversation is not None:
            raise InvalidParameter("conversation", "was given together with previous_response_id; give one")
        if self.background and self.store is False:
            raise InvalidParameter("background", "needs store: true, since its response is fetched later")

    def as_chat(self, template_reads: Collection[str]) -> ChatRequest:
        """Return the equivalent chat completion request for a chat template that reads these variables."""
        chat = self.chat_request(
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.with_logprobs or None,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort="xhigh" if self.effort == "max" else self.effort,
            verbosity=self.verbosity if "verbosity" in template_reads else None,
            response_format=_response_format(self.text_format),
            tools=self.offered_tools.chat_tools(),
            tool_choice=self.offered_tools.chat_choice(),
            parallel_tool_calls=self.parallel_tool_calls if self.offered_tools else None,
        )
        check_encodable("text.format", self.text_format)
        return chat


def _response_format(given: dict[str, Any]) -> Any:
    """Convert {type, name, schema, strict} to {type, json_schema: {name, schema, strict}}."""
    if given == {"type": "text"}:
        return None
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


class CompactRequest(RequestBody):
    """A conversation that is replaced by a summary of it."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: StoredId = None
    # Accepted as in ResponsesRequest, and without effect.
    prompt_cache_key: Label = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Tier = None
    tools: Tools | None = None  # Codex CLI sends what it sends with a response.
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
