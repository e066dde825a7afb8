"""Chat choices with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chairlift.server.openai.response_builder import ChatChoiceFormat, Choice
from chairlift.server.process.messages import Update
from chairlift.text.assistant_parts import (
    ArgumentsDelta,
    AssistantParser,
    AssistantPart,
    CallBegun,
    ContentDelta,
    ReasoningDelta,
)
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tools.tool_use import ToolUse


class ParsedChoiceFormat(ChatChoiceFormat):
    """Chat choices with reasoning or tool calls. Log-probabilities include the tokens of both."""

    def __init__(
        self,
        with_logprobs: bool,
        tools: ToolUse,
        new_parser: Callable[[], AssistantParser],
        *,
        include_reasoning: bool = True,
    ) -> None:
        super().__init__(with_logprobs)
        self._tools = tools
        self._new_parser = new_parser
        self._include_reasoning = include_reasoning
        self._parsers: dict[int, AssistantParser] = {}  # parsers of streamed choices, by index
        self._called: set[int] = set()  # indices of choices with a call

    def choice(self, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
        parser = self._new_parser()
        parts = self._shown(parser.push(choice.text) + parser.close())
        content, calls = join_parts(parts)
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        if calls or reasoning:
            message["content"] = content or None
        reason = self._tools.finish_reason(choice.finish_reason, bool(calls))
        return super().choice(choice, tokenizer) | {"message": message, "finish_reason": reason}

    def _shown(self, parts: list[AssistantPart]) -> list[AssistantPart]:
        return [part for part in parts if self._include_reasoning or not isinstance(part, ReasoningDelta)]

    def deltas(self, choice: Choice, update: Update, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Return one chunk per part. An update may have several parts, or none while the parser holds text back."""
        parser = self._parsers.get(choice.index) or self._parsers.setdefault(choice.index, self._new_parser())
        parts = parser.push(update.text)
        if update.finish_reason is not None:
            parts += parser.close()
        parts = self._shown(parts)
        if any(isinstance(part, CallBegun) for part in parts):
            self._called.add(choice.index)
        deltas = [_delta(part) for part in parts]
        if update.finish_reason is not None or (self.with_logprobs and update.logprobs and not deltas):
            deltas.append({})
        chunks = [self.delta(choice, delta) for delta in deltas]
        if chunks:
            chunks[0]["logprobs"] = self.logprobs(update.logprobs, tokenizer)
            chunks[-1]["finish_reason"] = self._tools.finish_reason(update.finish_reason, choice.index in self._called)
            chunks[-1]["stop_reason"] = update.stop_reason
        return [*self.first_deltas(choice), *chunks]


def join_parts(parts: list[AssistantPart]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the tool calls of a whole message."""
    content = "".join(part.text for part in parts if isinstance(part, ContentDelta))
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ArgumentsDelta):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    calls = [part for part in parts if isinstance(part, CallBegun)]
    return content, [_call(call, arguments.get(call.index, "")) for call in calls]


def _call(call: CallBegun, arguments: str) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _delta(part: AssistantPart) -> dict[str, Any]:
    match part:
        case ReasoningDelta(text=text):
            return {"reasoning_content": text, "reasoning": text}
        case ContentDelta(text=text):
            return {"content": text}
        case CallBegun(index=index):
            return {"tool_calls": [{"index": index, **_call(part, "")}]}
        case ArgumentsDelta(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
