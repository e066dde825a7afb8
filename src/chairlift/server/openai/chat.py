"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chairlift.server.generation.endpoint import GenerationRequest, ResponseBuilder, TokenizedPrompts
from chairlift.server.generation.usage import Usage
from chairlift.server.http.unknown_fields import say_ignored
from chairlift.server.openai.chat_fields import check_message_fields, checked_variables, known_choice, known_tools
from chairlift.server.openai.parsed_responses import ParsedChoiceFormat
from chairlift.server.openai.response_builder import ChatChoiceFormat, CompletionResponseBuilder
from chairlift.server.openai.types import ChatRequest
from chairlift.server.served_model import ServedModel
from chairlift.text.assistant_parts import AssistantParser
from chairlift.text.messages import known_roles
from chairlift.text.reasoning.reasoning_use import ReasoningUse, split_reasoning
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
