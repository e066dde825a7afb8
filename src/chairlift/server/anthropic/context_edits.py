"""The edits of `context_management`: what is cleared from a long conversation before the model sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Entries, StrictModel

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
