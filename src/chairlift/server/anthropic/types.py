"""The request bodies of /v1/messages, and their translation to a chat completion request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.errors import THREAD_UNSUPPORTED
from chairlift.server.generation.endpoint import Entries, Integer, StrictModel, Tier, parse_at
from chairlift.server.openai.types import MAX_MESSAGES, ChatRequest, GenerationBody, Tools

MAX_STOP_SEQUENCES = 64
MIN_THINKING_BUDGET = 1
# Claude Code begins the system prompt with this block, which is for Anthropic's accounting. It differs in each session,
# so that no prefix would be found in the cache.
BILLING_HEADER = "x-anthropic-billing-header:"

_REFUSED = {
    "container": "this server runs no tools, so it has no containers",
    "mcp_servers": "this server executes no tools; the client must",
    "compaction": "this server writes no summaries; ask the model for one",
    "fallback_credit_token": "this server refuses no conversation, so it issues no such tokens",
    "stop": "is called stop_sequences here",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CacheControl(StrictModel):
    """Has no effect: every prefix is cached, and shared by content."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None  # Earlier responses have them.


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None  # when a block sent back is refused, which here is never


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(StrictModel):
    user_id: str | None = None


class MessageTool(StrictModel):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: Entries[dict[str, Any]] | None = None  # shown behind the description
    allowed_callers: Entries[str] | None = None
    defer_loading: bool | None = None  # hidden until a tool result refers to it
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are generated


class MessageToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


# ---- the edits of `context_management`: what is cleared from a long conversation before the model sees it ------------

CLEARED = "[This result was cleared to keep the conversation short.]"
MAX_EDITS = 3  # each may encode the conversation once more
# Anthropic's defaults.
KEPT_THINKING_TURNS, KEPT_TOOL_USES = 1, 3
CLEARING_TOKENS, COMPACTING_TOKENS = 100_000, 150_000

Messages = list[dict[str, Any]]
Change = tuple[Messages, dict[str, Any]]  # the new messages, and what is reported of them
Amount = Annotated[int, Field(ge=0)]


class InputTokens(StrictModel):
    type: Literal["input_tokens"]
    value: Amount


class ToolUses(StrictModel):
    type: Literal["tool_uses"]
    value: Amount


class ThinkingTurns(StrictModel):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(StrictModel):
    type: Literal["all"]


class ContextEdit(StrictModel):
    @property
    def least(self) -> int:
        """The tokens that the change must save; otherwise it is not made."""
        return 0

    def change(self, messages: Messages, num_tokens: int) -> Change | None:
        """Return the change of valid messages whose prompt has `num_tokens`; None if nothing is to be cleared."""
        raise NotImplementedError


class ClearThinking(ContextEdit):
    """Clears the thinking of all but the last turns that have some."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns | AllTurns | None = None

    def change(self, messages: Messages, num_tokens: int) -> Change | None:
        if self.keep == "all" or isinstance(self.keep, AllTurns):
            return None
        kept = KEPT_THINKING_TURNS if self.keep is None else self.keep.value
        turns = [index for index, message in enumerate(messages) if any(map(_is_thinking, _blocks(message)))]
        edited = list(messages)
        for index in turns[:-kept]:
            content = [block for block in _blocks(messages[index]) if not _is_thinking(block)]
            edited[index] = {**messages[index], "content": content}
        report = {"type": self.type, "cleared_thinking_turns": len(turns) - kept}
        return (edited, report) if len(turns) > kept else None


class ClearToolUses(ContextEdit):
    """Clears the results of all but the last tool uses, once the conversation is longer than its trigger."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: InputTokens | ToolUses | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokens | None = None
    clear_tool_inputs: bool | Entries[str] | None = None
    exclude_tools: Entries[str] | None = None

    @property
    def least(self) -> int:
        return 0 if self.clear_at_least is None else self.clear_at_least.value

    def change(self, messages: Messages, num_tokens: int) -> Change | None:
        uses = [block for message in messages for block in _blocks(message) if block["type"] == "tool_use"]
        trigger = self.trigger or InputTokens(type="input_tokens", value=CLEARING_TOKENS)
        if (num_tokens if isinstance(trigger, InputTokens) else len(uses)) <= trigger.value:
            return None
        kept = KEPT_TOOL_USES if self.keep is None else self.keep.value
        names = {use["id"]: use["name"] for use in uses[: max(len(uses) - kept, 0)]}
        excluded = frozenset(self.exclude_tools or ())
        names = {id_: name for id_, name in names.items() if name not in excluded}
        inputs = self._cleared_inputs(names)
        edited = [_without(message, names, inputs) for message in messages]
        return (edited, {"type": self.type, "cleared_tool_uses": len(names)}) if names else None

    def _cleared_inputs(self, names: Mapping[str, str]) -> Collection[str]:
        """Return the ids of the uses whose inputs are cleared too."""
        if not isinstance(self.clear_tool_inputs, list):
            return names if self.clear_tool_inputs else ()
        cleared = frozenset(self.clear_tool_inputs)
        return {id_ for id_, name in names.items() if name in cleared}


class Compact(ContextEdit):
    """Asks for a summary of a conversation that is longer than its trigger. This server writes none."""

    type: Literal["compact_20260112"]
    trigger: InputTokens | None = None
    pause_after_compaction: bool | None = None
    instructions: str | None = None

    def change(self, messages: Messages, num_tokens: int) -> Change | None:
        limit = COMPACTING_TOKENS if self.trigger is None else self.trigger.value
        if num_tokens <= limit:
            return None
        problem = f"the conversation has {num_tokens} tokens, more than {limit}, and this server writes no summaries"
        raise InvalidParameter("context_management", f"{self.type}: {problem}; send a shorter conversation")


class ContextManagement(StrictModel):
    edits: Annotated[
        list[Annotated[ClearThinking | ClearToolUses | Compact, Field(discriminator="type")]] | None,
        Field(max_length=MAX_EDITS),
    ] = None


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _is_thinking(block: dict[str, Any]) -> bool:
    return block["type"] in ("thinking", "redacted_thinking")


def _without(message: dict[str, Any], results: Collection[str], inputs: Collection[str]) -> dict[str, Any]:
    """Return a message without the results and the inputs of the tool uses with these ids."""
    content = []
    for block in _blocks(message):
        if block["type"] == "tool_result" and block["tool_use_id"] in results:
            block = {**block, "content": CLEARED}
        elif block["type"] == "tool_use" and block["id"] in inputs:
            block = {**block, "input": {}}
        content.append(block)
    return {**message, "content": content} if content else message


# ---- bodies ----------------------------------------------------------------------------------------------------------


class CountTokensRequest(GenerationBody):
    """What /v1/messages/count_tokens reads; /v1/messages has it too."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Entries[TextBlock] | None = None
    tools: Tools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the earlier name of output_config.format
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    # Satisfied by every answer: this server has one speed, and no refusals after which others would be asked.
    speed: Literal["standard", "fast"] | None = None
    fallbacks: Literal["default"] | Entries[dict[str, Any]] | None = None
    # Clients that count the body of a later request send these too, which change no count.
    max_tokens: Any = None
    stop_sequences: Any = None
    metadata: Any = None
    service_tier: Any = None
    # Declared to be refused with a reason.
    thread: Any = None
    container: Any = None
    mcp_servers: Any = None
    compaction: Any = None
    fallback_credit_token: Any = None

    @property
    def system_text(self) -> str | None:
        if self.system is None or isinstance(self.system, str):
            return self.system
        texts = [block.text for block in self.system if not block.text.startswith(BILLING_HEADER)]
        return "\n\n".join(texts) if texts else None

    def as_chat(self, *, reasons: bool, **more: Any) -> ChatRequest:
        """Return the equivalent chat completion request for a model that `reasons` or does not."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) not in (None, []):
                raise InvalidParameter(name, reason)
        if self.thread is not None:
            problem = "this server holds no conversations; send all messages, without thread"
            raise InvalidParameter("thread", problem, THREAD_UNSUPPORTED)
        effort, budget = self._reasoning()
        if reasons:
            more |= {"reasoning_effort": effort, "thinking_token_budget": budget}
        choice = self.tool_choice or MessageToolChoice(type="auto")
        tools = self._chat_tools()
        return self.chat_request(
            chat_template_kwargs=self.chat_template_kwargs,
            response_format=self._response_format(),
            tools=tools,
            tool_choice=_chat_choice(choice) if tools else None,
            parallel_tool_calls=False if tools and choice.disable_parallel_tool_use else None,
            **more,
        )

    @property
    def reasoning_parameter(self) -> str:
        """The parameter that set the reasoning effort."""
        disabled = self.thinking is not None and self.thinking.type == "disabled"
        given = self.output_config is not None and self.output_config.effort is not None
        return "output_config.effort" if given and not disabled else "thinking"

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

    def _chat_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model sees: deferred ones only after a tool result that refers to them."""
        given = [_chat_tool(index, tool) for index, tool in enumerate(self.tools or [])]
        deferred = {tool["name"] for tool in self.tools or [] if tool.get("defer_loading")}
        deferred -= set(_referenced_tools(self.messages)) if deferred else set()
        shown = [tool for tool in given if tool["function"]["name"] not in deferred]
        if given and not shown:
            raise InvalidParameter("tools", "all have defer_loading, and no tool result refers to one of them")
        return shown or None

    def _response_format(self) -> dict[str, Any] | None:
        format_ = self.output_config.format if self.output_config else None
        if format_ is not None and self.output_format is not None:
            raise InvalidParameter("output_format", "was given together with output_config.format; give one")
        format_ = format_ or self.output_format
        if format_ is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.schema_}}


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)]  # 0: compute the prompt, so that it is cached
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Tier = None

    def as_chat(self, *, reasons: bool, **more: Any) -> ChatRequest:
        return super().as_chat(
            reasons=reasons, max_completion_tokens=self.max_tokens or None, stop=self.stop_sequences, **more
        )


def _chat_tool(index: int, given: dict[str, Any]) -> dict[str, Any]:
    """Convert {name, description, input_schema} to {type, function: {name, description, parameters}}."""
    kind = given.get("type")
    if kind not in (None, "custom"):
        problem = f"only tools with an input_schema, which the client runs, are supported, got {str(kind)[:40]!r}"
        raise InvalidParameter(f"tools[{index}].type", problem)
    tool = parse_at(f"tools[{index}]", MessageTool, given)
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise InvalidParameter(f"tools[{index}].allowed_callers", "must contain direct: this server executes no code")
    if tool.input_schema is None:
        raise InvalidParameter(f"tools[{index}].input_schema", "is missing")
    description = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of its input:\n{examples}".lstrip()
    function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _chat_choice(choice: MessageToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidParameter("tool_choice.name", "is missing")
    return {"type": "function", "function": {"name": choice.name}}


def _referenced_tools(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of the tools to which blocks of tool results refer."""
    for message in messages:
        for result in _objects(message.get("content")):
            for block in _objects(result.get("content")) if result.get("type") == "tool_result" else ():
                if block.get("type") == "tool_reference":
                    yield str(block.get("tool_name"))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
