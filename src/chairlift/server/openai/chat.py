"""POST /v1/chat/completions and /v1/completions, and the fields of messages and tools in requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import GenerationRequest, Tokenized
from chairlift.server.images.reader import take_images
from chairlift.server.openai.response_builder import (
    ChatChoiceFormat,
    CompletionResponseBuilder,
    Echo,
    ParsedChoiceFormat,
    TextChoiceFormat,
)
from chairlift.server.openai.types import ChatRequest, CompletionRequest, ThinkingSwitch, check_token_ids
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.messages import ImageInput
from chairlift.server.wire.unknown_fields import check_unknown, say_ignored, without_unknown
from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.fill_in_middle import encode_fill_in_middle
from chairlift.text.images import ChatImages
from chairlift.text.messages import checked_messages
from chairlift.text.reasoning import ReasoningUse, split_reasoning
from chairlift.text.reasoning_formats.base import SWITCHES
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool import Calling, ToolChoice
from chairlift.text.tools.tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A tokenized conversation, and how the output after it is read."""

    tokens: list[int]
    params: SamplingParams
    tools: ToolUse
    reasoning: ReasoningUse
    is_plain: bool  # whether the output has neither reasoning nor calls
    images: list[ImageInput] = field(default_factory=list)

    def parser(self) -> AssistantParser:
        """Create a parser for one completion's text."""
        return self.reasoning.parser(self.tools.parser())


@dataclass(eq=False)
class ChatGeneration(GenerationRequest):
    id_prefix = "chatcmpl-"

    body: ChatRequest
    prompt_parameter: str = "messages"

    @cached_property
    def tools(self) -> ToolUse:
        """The tool settings, validated on first use, which is in a thread since schemas may be large."""
        body, format_ = self.body, self.model.tool_format
        if not body.tools and body.tool_choice is None and body.parallel_tool_calls is None:
            return ToolUse(format_, (), ToolChoice(Calling.NONE))
        return ToolUse.of(format_, known_tools(body.tools), known_choice(body.tool_choice), body.parallel_tool_calls)

    def tokenize(self, max_tokens: int) -> Tokenized:
        body, model = self.body, self.model
        check_message_fields(body.messages, model.tokenizer)
        if model.reasoning_format is None and _effort(body) not in (None, "none"):
            say_ignored("reasoning_effort" if body.reasoning_effort else "thinking")
        prompt = self.encode(body.messages, max_tokens)
        last = checked_messages(ChatImages.of(body.messages[-1:])[0])[0] if body.echo else {}
        echo = (last["content"] or "") if last.get("role") == "assistant" else ""
        choices = ChatChoiceFormat(bool(body.logprobs), echo)
        if not prompt.is_plain:
            shown = body.include_reasoning is not False
            choices = ParsedChoiceFormat(
                choices.with_logprobs, prompt.tools, prompt.parser, echo=echo, include_reasoning=shown
            )
        reply = partial(CompletionResponseBuilder, choices, model, body)
        return Tokenized(
            [prompt.tokens], prompt.params, reply, None if prompt.is_plain else prompt.reasoning, prompt.images
        )

    def encode(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, *, continue_final: bool = False
    ) -> ChatPrompt:
        """Tokenize these messages with the settings of the request."""
        body, tokenizer, format_ = self.body, self.model.tokenizer, self.model.reasoning_format
        tools, effort, variables = self.tools, _effort(body), checked_variables(body.chat_template_kwargs, tokenizer)
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        if body.verbosity is not None:
            # Templates without this variable write as they do, which is what the usual verbosity asks for.
            if "verbosity" in tokenizer.template_reads:
                variables["verbosity"] = body.verbosity
            elif body.verbosity != "medium":
                say_ignored("verbosity")
        if variables or effort is not None:
            variables, switches = split_reasoning(variables, effort, format_, tokenizer)
            variables = switches | variables
        messages, pictures, prepared = take_images(messages, self.model.images, max_tokens)
        tokens = tools.encode(
            tokenizer,
            messages,
            reasoning=format_,
            max_tokens=max_tokens,
            continue_final_message=continue_final or bool(body.continue_final_message),
            system_prompt=body.system_prompt,
            images=pictures,
            **variables,
        )
        reasoning = ReasoningUse(None, tokenizer)
        if format_ is not None:
            reasoning = ReasoningUse.after(tokens, format_, tokenizer)
        is_plain = not tools.tools and (format_ is None or not reasoning.active)
        params = self.params if is_plain else tools.applied_to(self.params, reasoning)
        images = [] if self.model.images is None else self.model.images.place(tokens, prepared)
        return ChatPrompt(tokens, params, tools, reasoning, is_plain, images)


def _effort(body: ChatRequest) -> str | None:
    """Return the reasoning effort that the client asks for, in one of several ways."""
    if body.reasoning_effort is not None:
        return body.reasoning_effort
    switch = body.thinking if body.enable_thinking is None else body.enable_thinking
    if isinstance(switch, ThinkingSwitch):
        switch = None if switch.type == "auto" else switch.type != "disabled"
    return None if switch is None else "medium" if switch else "none"


_RETURNED = ("refusal", "reasoning", "reasoning_content", "annotations", "audio", "parsed")  # parts of responses
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "function_call", *_RETURNED})
_PART_FIELDS = ("type", "text", "refusal", "cache_control")
_CALL_FIELDS = ("id", "type", "index", "function")
_CALLED_FIELDS = ("name", "arguments", "parsed_arguments")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_RESERVED_VARIABLES = (
    *("messages", "tools", "chat_template", "tokenize", "max_tokens"),
    *("add_generation_prompt", "continue_final_message"),
)
_REFUSED_FIELDS = {
    "function_call": "is not supported: it was replaced by tool_calls",
    "audio": "is not supported: this server reads text only",
}


def check_message_fields(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> None:
    """Apply the rule for unknown fields to messages, and refuse known ones that would be lost. Fields that are named in
    the chat template are known."""
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not message.keys() <= _MESSAGE_FIELDS:
            check_unknown(path, message, _MESSAGE_FIELDS, tokenizer.template_names)
        for name, problem in _REFUSED_FIELDS.items():
            if message.get(name) is not None and name not in tokenizer.template_names:
                raise InvalidParameter(f"{path}.{name}", problem)
        for part_index, part in _objects(message.get("content")):
            # Parts of other types are refused as such.
            if part.get("type") == "text":
                check_unknown(f"{path}.content[{part_index}]", part, _PART_FIELDS)
        for call_index, call in _objects(message.get("tool_calls")):
            call_path = f"{path}.tool_calls[{call_index}]"
            check_unknown(call_path, call, _CALL_FIELDS, tokenizer.template_names)
            if isinstance(function := call.get("function"), dict):
                check_unknown(f"{call_path}.function", function, _CALLED_FIELDS, tokenizer.template_names)


def encode_messages(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> list[int]:
    """Return the prompt of a conversation that nothing is generated for. `options` are those of
    `Tokenizer.encode_chat`."""
    check_message_fields(messages, model.tokenizer)
    use = ToolUse.of(model.tool_format, known_tools(tools), None, None)
    messages, pictures, _ = take_images(messages, model.images)
    return use.encode(model.tokenizer, messages, reasoning=model.reasoning_format, images=pictures, **options)


def checked_variables(given: Mapping[str, Any] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables of chat_template_kwargs that the template reads; others are unknown fields. Those that
    requests set by other parameters are refused."""
    if not given:
        return {}
    for reserved in _RESERVED_VARIABLES:
        if reserved in given:
            raise InvalidParameter("chat_template_kwargs", f"{reserved!r} cannot be set there")
    return without_unknown("chat_template_kwargs", dict(given), {*SWITCHES, *tokenizer.template_reads})


def known_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools without unknown fields, which the chat template would show to the model."""
    if tools is None:
        return None
    return [_known_function(f"tools[{index}]", tool, _FUNCTION_FIELDS) for index, tool in enumerate(tools)]


def known_choice(choice: Any) -> Any:
    """Return a tool_choice without unknown fields."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _known_function("tool_choice", choice, ("name",))
    kept = without_unknown("tool_choice", choice, ("type", "allowed_tools"))
    if isinstance(allowed := kept.get("allowed_tools"), dict):
        kept["allowed_tools"] = without_unknown("tool_choice.allowed_tools", allowed, ("mode", "tools"))
    return kept


def _known_function(path: str, given: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return a function, of which most servers take a type to be given."""
    if given.get("type", "function") != "function":
        return given  # refused as such
    kept = {"type": "function", **without_unknown(path, given, ("type", "function"))}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = without_unknown(f"{path}.function", function, fields)
    return kept


def _objects(values: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(values, list):
        return []
    return [(index, value) for index, value in enumerate(values) if isinstance(value, dict)]


class TextGeneration(GenerationRequest):
    id_prefix = "cmpl-"

    body: CompletionRequest

    def __init__(self, body: CompletionRequest, model: ServedModel) -> None:
        params, self._prompts = body.params(model), body.prompts()
        super().__init__(
            body, model, params, body.max_tokens, streams=bool(body.stream), num_prompts=len(self._prompts)
        )

    def tokenize(self, max_tokens: int) -> Tokenized:
        prompts = [self._encode(prompt, max_tokens) for prompt in self._prompts]
        echoes = [
            self._echo(prompt, tokens)
            for prompt, tokens in zip(self._prompts, prompts, strict=True)
            for _ in range(self.params.n)
        ]
        choices = TextChoiceFormat(self.body.logprobs, echoes)
        return Tokenized(prompts, self.params, partial(CompletionResponseBuilder, choices, self.model, self.body))

    def _encode(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt)
        if self.body.suffix:
            return encode_fill_in_middle(self.model.tokenizer, prompt, self.body.suffix, max_tokens=max_tokens)
        if isinstance(prompt, str):
            return self.model.tokenizer.encode(prompt, max_tokens=max_tokens)
        return prompt

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        if not self.body.echo:
            return Echo()
        text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)
        return Echo(text, tokens[0] if tokens and self.body.logprobs is not None else None)
