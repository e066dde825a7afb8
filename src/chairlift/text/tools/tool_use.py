"""The tools of one request: prompt, grammar of forced calls and parser of the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import MAX_STRUCTURE_LENGTH, Structure, StructureKind
from chairlift.errors import InvalidParameter
from chairlift.text.assistant_parts import AssistantParser, PlainParser
from chairlift.text.chat_template import RefusedByTemplate
from chairlift.text.images import ChatImages
from chairlift.text.messages import checked_messages, plain_data
from chairlift.text.reasoning import ReasoningUse
from chairlift.text.reasoning_formats.base import ReasoningFormat
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import Message, ToolFormat
from chairlift.text.tools.call_grammar import CallGrammar, marker_speller
from chairlift.text.tools.tool import Calling, Tool, ToolChoice, allowed_tools, checked_choice, checked_tools

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool settings of one request, which may have no tools but calls in its history."""

    format: ToolFormat
    tools: Sequence[Tool]  # tools shown to the model
    choice: ToolChoice
    parallel: bool = True

    @classmethod
    def of(cls, format_: ToolFormat, tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
        """Validate the tool parameters of a chat request."""
        checked = checked_tools(tools or [])
        if parallel is not None and not checked:
            raise InvalidParameter("parallel_tool_calls", "only goes with tools")
        choice, checked = allowed_tools(choice, checked)
        chosen = checked_choice(choice, checked)
        offered = [] if chosen.calling is Calling.NONE else checked
        return cls(format_, offered, chosen, parallel is not False)

    @property
    def forced(self) -> bool:
        return self.choice.forced

    def parser(self) -> AssistantParser:
        """Create a parser for one completion's text."""
        if not self.tools:
            return PlainParser()
        schemas = {tool.name: tool.schema for tool in self.tools}
        return self.format.parser(schemas, max_calls=None if self.parallel else 1, forced=self.forced)

    def finish_reason(self, reason: str | None, called: bool) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" if the model chose to call, "stop" if the call was forced by
        name."""
        return "tool_calls" if reason == "stop" and called and self.choice.calling is not Calling.NAMED else reason

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser reads."""
        return self.format.markers if self.tools else ()

    def applied_to(self, params: SamplingParams, reasoning: ReasoningUse) -> SamplingParams:
        """Add the settings that tools and reasoning require to the request's sampling parameters."""
        if not self.tools and not reasoning.active:
            return params
        structure = self.structure(reasoning, params.structure)
        if structure is not None and structure.optional and params.beam_width is not None:
            structure = None  # beam search follows no grammar
        # The parsers need the markers in the text.
        visible = reasoning.tokenizer.special_ids_of([*self.markers, *reasoning.markers])
        return params.clone(visible_special_ids=[*dict.fromkeys(visible)], structure=structure)

    def structure(self, reasoning: ReasoningUse, requested: Structure | None = None) -> Structure | None:
        """Return the structure of the output after the reasoning: calls if they are forced, else calls or the requested
        structure, else content and calls."""
        if not self.tools:
            return None if requested is None else requested.after(reasoning.grammar(answer=True, preambles=False))
        structure = self._structure_with_calls(reasoning, requested)
        return (
            None if structure is None else structure.after(reasoning.grammar(answer=False, preambles=requested is None))
        )

    def _structure_with_calls(self, reasoning: ReasoningUse, requested: Structure | None) -> Structure | None:
        tokenizer = reasoning.tokenizer
        if self.forced:
            # A response_format applies to content, of which there is none; other structures apply to the whole output.
            if requested is not None and not requested.parameter.startswith("response_format"):
                raise InvalidParameter(requested.parameter, "does not go with a tool_choice that forces a call")
            return Structure.grammar(self._calls(tokenizer).forced(), "tools")
        calls, header = self._calls(tokenizer), reasoning.answer_header()
        if requested is not None:
            return Structure.grammar(calls.or_json(_requested_schema(requested), header), requested.parameter)
        grammar, strict = calls.after_content(header), any(tool.strict for tool in self.tools)
        if len(grammar) > MAX_STRUCTURE_LENGTH and not strict:
            return None
        return replace(Structure.grammar(grammar, "tools"), optional=not strict)

    def _calls(self, tokenizer: Tokenizer) -> CallGrammar:
        named = self.choice.function
        tools = [tool for tool in self.tools if named is None or tool.name == named]
        return self.format.grammar(tools, parallel=self.parallel and named is None, marker=marker_speller(tokenizer))

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Return the token ids of `prompt`."""
        return self.prompt(tokenizer, messages, **options)[1]

    def prompt(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        reasoning: ReasoningFormat | None = None,
        max_tokens: int | None = None,
        continue_final_message: bool = False,
        system_prompt: str | None = None,
        images: ChatImages | None = None,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """Return the prompt of messages whose roles are known, as text and as token ids. `options` are those of
        `Tokenizer.encode_chat`; `system_prompt` is for conversations without a system message."""
        history = checked_messages(messages, tokenizer.template_strings)
        plain = {name: plain_data(name, value) for name, value in options.items()}
        encode = partial(
            tokenizer.encode_checked_chat,
            max_tokens=max_tokens,
            continue_final_message=continue_final_message,
            images=images,
            **plain,
        )
        if reasoning is not None:
            history = reasoning.history(history)
        if not system_prompt or any(message["role"] in SYSTEM_ROLES for message in history):
            return self._encode_history(tokenizer, history, encode)
        try:
            return self._encode_history(tokenizer, in_system_message(history, system_prompt), encode)
        except RefusedByTemplate:  # the template may have no system role
            return self._encode_history(tokenizer, in_user_message(history, system_prompt), encode)

    def _encode_history(
        self, tokenizer: Tokenizer, history: list[Message], encode: Callable[..., tuple[str, list[int]]]
    ) -> tuple[str, list[int]]:
        if tokenizer.template_shows_tools:
            shown = [plain_data("tools", self.format.shown(tool)) for tool in self.tools]
            return encode(self.format.history(history), tools=shown or None)
        history = as_plain_messages(history, self.format)
        if not self.tools:
            return encode(history)
        description = describe(self.tools, self.format)
        try:
            return encode(in_system_message(history, description))
        except RefusedByTemplate:  # the template may have no system role
            return encode(in_user_message(history, description))


def _requested_schema(requested: Structure) -> dict[str, Any]:
    if requested.kind is StructureKind.JSON_OBJECT:
        return {"type": "object"}
    if requested.kind is not StructureKind.JSON_SCHEMA:
        raise InvalidParameter(requested.parameter, "cannot be combined with tools; only a JSON schema can")
    try:
        schema = json.loads(requested.text)
    except (ValueError, RecursionError):
        raise InvalidParameter(requested.parameter, "must be a JSON schema") from None
    return schema if isinstance(schema, dict) else {}


# Chat templates without tool support: descriptions in the prompt, and calls as plain messages.


def describe(tools: Sequence[Tool], format_: ToolFormat) -> str:
    """Return the instructions for calling these tools."""
    lines = "\n".join(json.dumps(tool.given, ensure_ascii=False) for tool in tools)
    example = format_.write([("function_name", '{"parameter": "value"}')])
    return (
        "You can call functions to help with the request. They are described here as JSON, one per line:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        f"To call a function, answer in exactly this form, with its name and its arguments:\n{example}\n\n"
        "The results come back between <tool_response> tags. If no function helps, answer in words."
    )


def in_system_message(messages: list[Message], description: str) -> list[Message]:
    """Append the description to the system message, which is added if there is none."""
    if messages[0]["role"] in SYSTEM_ROLES:
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def in_user_message(messages: list[Message], description: str) -> list[Message]:
    """Prepend the description to the first user message: for templates that refuse system messages."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": description}, *messages]
    user = {**messages[first], "content": f"{description}\n\n{messages[first]['content']}"}
    return [*messages[:first], user, *messages[first + 1 :]]


def as_plain_messages(messages: list[Message], format_: ToolFormat) -> list[Message]:
    """Turn calls into the text that the model generated, and results into user messages."""
    plain: list[Message] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results:  # merged into one message: templates require alternating roles
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += [_with_calls_as_text(message, format_) for message in group]
    return plain


def _with_calls_as_text(message: Message, format_: ToolFormat) -> Message:
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(each["name"], json.dumps(each.get("arguments") or {}, ensure_ascii=False)) for each in functions]
    text = format_.write(calls)
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {key: item for key, item in message.items() if key != "tool_calls"} | {"content": content}
