"""POST /v1/chat/completions, and the fields of messages and tools in requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.response_builder import ChatChoiceFormat, CompletionResponseBuilder, ParsedChoiceFormat
from chairlift.server.openai.types import ChatRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.unknown_fields import check_unknown, say_ignored, without_unknown
from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.messages import known_roles
from chairlift.text.reasoning import ReasoningUse, split_reasoning
from chairlift.text.tools.tool_use import ToolUse


class ChatGeneration(GenerationRequest):
    id_prefix = "chatcmpl-"
    prompt_parameter = "messages"

    def __init__(self, body: ChatRequest, model: ServedModel) -> None:
        params = body.params(model.sampling)
        if params.thinking_token_budget is None and model.reasoning_format is not None:
            params = params.clone(thinking_token_budget=body.given_budget)
        super().__init__(body, params, body.given_max_tokens)
        self._body = body
        self._model = model
        self.reasoning = ReasoningUse(None, model.tokenizer)  # replaced once the prompt is known

    @cached_property
    def tools(self) -> ToolUse:
        """The tool settings, validated on first use, which is in a thread since schemas may be large."""
        body = self._body
        tools, choice = known_tools(body.tools), known_choice(body.tool_choice)
        return ToolUse.of(self._model.tool_format, tools, choice, body.parallel_tool_calls)

    @property
    def shows_later_system(self) -> bool:
        """Whether the model's chat template shows what the system says in mid-conversation."""
        return self._model.tokenizer.template_shows_later_system

    def tokenize(self, max_tokens: int) -> TokenizedPrompts:
        check_message_fields(self._body.messages, self._model.tokenizer.template_names)
        if self._model.reasoning_format is None and self._body.effort not in (None, "none"):
            say_ignored("reasoning_effort" if self._body.reasoning_effort else "thinking")
        return self.tokenize_messages(self._body.messages, max_tokens)

    def tokenize_messages(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, *, continue_final: bool = False
    ) -> TokenizedPrompts:
        tools, model, options = self.tools, self._model, checked_variables(self._body.chat_template_kwargs)
        if self._body.add_generation_prompt is not None:
            options["add_generation_prompt"] = self._body.add_generation_prompt
        options["continue_final_message"] = continue_final or bool(self._body.continue_final_message)
        if self._body.verbosity is not None:
            options |= self._verbosity(self._body.verbosity)
        options, effort = split_reasoning(options, self._body.effort, model.reasoning_format, model.tokenizer)
        prompt = tools.encode(
            model.tokenizer,
            known_roles(messages, model.tokenizer.template_strings),
            reasoning=model.reasoning_format,
            max_tokens=max_tokens,
            **effort | options,
        )
        self.reasoning = ReasoningUse.after(prompt, model.reasoning_format, model.tokenizer)
        return TokenizedPrompts([prompt], tools.applied_to(self.params, self.reasoning), self.reasoning)

    def _verbosity(self, level: str) -> dict[str, str]:
        """Return the variable of templates that have one; without it, only the usual verbosity is what is asked for."""
        if "verbosity" in self._model.tokenizer.template_reads:
            return {"verbosity": level}
        if level != "medium":
            say_ignored("verbosity")
        return {}

    def parser(self) -> AssistantParser:
        """Create a parser for one completion's text; called after `tokenize`."""
        return self.reasoning.parser(self.tools.parser())

    def response_builder(self, response_id: str, completion_ids: list[str], usage: Usage) -> ResponseBuilder:
        choices = ChatChoiceFormat(bool(self._body.logprobs))
        if self.tools.tools or self.reasoning.active:
            shown = self._body.include_reasoning is not False
            choices = ParsedChoiceFormat(choices.with_logprobs, self.tools, self.parser, include_reasoning=shown)
        return CompletionResponseBuilder(choices, self._model, self._body, response_id, completion_ids, usage)


_RETURNED = ("refusal", "reasoning", "reasoning_content", "annotations", "audio", "parsed")  # parts of responses
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", *_RETURNED)
_PART_FIELDS = ("type", "text", "refusal", "cache_control")
_CALL_FIELDS = ("id", "type", "index", "function")
_CALLED_FIELDS = ("name", "arguments", "parsed_arguments")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "max_tokens",
)
_REFUSED_FIELDS = {
    "function_call": "is not supported: it has given way to tool_calls",
    "audio": "is not supported: this server reads text only",
}


def check_message_fields(messages: Sequence[Mapping[str, Any]], named: Collection[str]) -> None:
    """Apply the rule for unknown fields to messages, and refuse known ones that would be lost. Fields that are `named`
    in the chat template are known."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        check_unknown(place, message, _MESSAGE_FIELDS, named)
        for name, problem in _REFUSED_FIELDS.items():
            if message.get(name) is not None and name not in named:
                raise InvalidParameter(f"{place}.{name}", problem)
        for part_index, part in _objects(message.get("content")):
            # Parts of other types are refused as such.
            if part.get("type") == "text":
                check_unknown(f"{place}.content[{part_index}]", part, _PART_FIELDS)
        for call_index, call in _objects(message.get("tool_calls")):
            call_place = f"{place}.tool_calls[{call_index}]"
            check_unknown(call_place, call, _CALL_FIELDS, named)
            if isinstance(function := call.get("function"), dict):
                check_unknown(f"{call_place}.function", function, _CALLED_FIELDS, named)


def encode_messages(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Return the prompt of a conversation that nothing is generated for. `options` are those of
    `Tokenizer.encode_chat`."""
    check_message_fields(messages, model.tokenizer.template_names)
    use = ToolUse.of(model.tool_format, known_tools(tools), None, None)
    roles = known_roles(messages, model.tokenizer.template_strings)
    return use.encode(model.tokenizer, roles, reasoning=model.reasoning_format, **options)


def checked_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of chat_template_kwargs without those that requests set by other parameters."""
    for reserved in _RESERVED_VARIABLES:
        if reserved in (given or ()):
            raise InvalidParameter("chat_template_kwargs", f"{reserved!r} cannot be set there")
    return dict(given or {})


def known_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools without unknown fields, which the chat template would show to the model."""
    if tools is None:
        return None
    return [_known_function(f"tools[{index}]", tool, _FUNCTION_FIELDS) for index, tool in enumerate(tools)]


def known_choice(choice: Any) -> Any:
    """Return a tool_choice without unknown fields."""
    return _known_function("tool_choice", choice, ("name",)) if isinstance(choice, dict) else choice


def _known_function(place: str, given: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    if given.get("type") != "function":
        return given  # refused as such
    kept = without_unknown(place, given, ("type", "function"))
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = without_unknown(f"{place}.function", function, fields)
    return kept


def _objects(values: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(values, list):
        return []
    return [(index, value) for index, value in enumerate(values) if isinstance(value, dict)]
