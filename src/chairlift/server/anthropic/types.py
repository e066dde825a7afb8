"""The request bodies of /v1/messages, and their translation to a chat completion request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.openai.strict import StrictModel, parse_at
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, GenerationBody, Integer, Tools

MAX_STOP_SEQUENCES = 64
MIN_THINKING_BUDGET = 1

_REFUSED = {
    "container": "this server runs no tools, so it has no containers",
    "mcp_servers": "this server executes no tools; the client must",
    "context_management": "is not supported; send the messages that the model should see",
    "stop": "is called stop_sequences here",
}
_PLACEHOLDER_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": ""}]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CacheControl(StrictModel):
    """Has no effect: every prefix is cached, and shared by content."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None  # of earlier responses


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(StrictModel):
    user_id: Annotated[str | None, Field(max_length=256)] = None


class MessageTool(StrictModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated


class MessageToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(GenerationBody):
    """What /v1/messages/count_tokens reads; /v1/messages has it too."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Tools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    # Declared to be refused with a reason instead of as unknown parameters.
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    @property
    def system_text(self) -> str | None:
        if self.system is None or isinstance(self.system, str):
            return self.system
        return "\n\n".join(block.text for block in self.system)

    def as_chat(self, max_tokens: int | None = None, stop: list[str] | None = None) -> ChatRequest:
        """Return the equivalent chat completion request. Messages are added after admission."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) not in (None, []):
                raise InvalidParameter(name, reason)
        effort, budget = self._reasoning()
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        shared |= {"stop": stop, "thinking_token_budget": budget}
        choice = self.tool_choice or MessageToolChoice(type="auto")
        given = dict(
            **shared,
            **self._extra_args,
            messages=_PLACEHOLDER_MESSAGES,
            max_completion_tokens=max_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=effort,
            response_format=self._response_format(),
            tools=[_chat_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            tool_choice=_chat_choice(choice) if self.tools else None,
            parallel_tool_calls=False if self.tools and choice.disable_parallel_tool_use else None,
        )
        return parse_at("", ChatRequest, given)

    def _reasoning(self) -> tuple[str | None, int | None]:
        """Return the reasoning effort and the thinking budget. Without `thinking` and an effort, the model does what it
        does by default."""
        effort = self.output_config.effort if self.output_config else None
        effort = "xhigh" if effort == "max" else effort
        if self.thinking is None:
            return effort, self.thinking_token_budget
        if self.thinking.type == "disabled":
            return "none", None
        budget = self.thinking.budget_tokens
        if self.thinking.type == "enabled" and (budget is None or budget < MIN_THINKING_BUDGET):
            raise InvalidParameter("thinking.budget_tokens", f"must be at least {MIN_THINKING_BUDGET}")
        return effort or "medium", budget

    def _response_format(self) -> dict[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = {"name": "output", "schema": self.output_config.format.schema_}
        return {"type": "json_schema", "json_schema": schema}


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def chat(self) -> ChatRequest:
        return self.as_chat(self.max_tokens, self.stop_sequences)


def _chat_tool(index: int, given: dict[str, Any]) -> dict[str, Any]:
    """Convert {name, description, input_schema} to {type, function: {name, description, parameters}}."""
    kind = given.get("type")
    if kind not in (None, "custom"):
        problem = f"only client tools are supported: this server runs no tools itself, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"tools[{index}].type", problem)
    tool = parse_at(f"tools[{index}]", MessageTool, given)
    if tool.input_schema is None:
        raise InvalidParameter(f"tools[{index}].input_schema", "is missing")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _chat_choice(choice: MessageToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidParameter("tool_choice.name", "is missing")
    return {"type": "function", "function": {"name": choice.name}}
