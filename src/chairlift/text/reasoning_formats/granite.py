"""Granite: sentences around the reasoning (3.2), or <think> … </think><response> … </response> (3.3), as plain text."""

from __future__ import annotations

from chairlift.text.assistant_parts import AssistantParser, AssistantPart
from chairlift.text.reasoning_formats.base import REASONING_FORMATS, Phase, ReasoningFormat
from chairlift.text.tools.reader import prefix_at_end

_SENTENCE = "Here is my thought process:"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"
_TAGS = f"{_RESPONSE}{_RESPONSE_END}"  # The template's instructions have these.


@REASONING_FORMATS.register("granite")
class GraniteReasoning(ReasoningFormat):
    order = 10

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self._tags = _TAGS in template
        if self._tags:
            self.begins, self.ends = ("<think>",), ("</think>",)
        else:
            self.begins = (_SENTENCE, "Here's my thought process:")
            self.ends = ("Here is my response:", "Here's my response:")

    @staticmethod
    def recognises(template: str) -> bool:
        return _SENTENCE in template or _TAGS in template

    def parser(self, phase: Phase, content: AssistantParser) -> AssistantParser:
        return super().parser(phase, ResponseTags(content) if self._tags else content)


class ResponseTags:
    """Removes the tags around a response."""

    def __init__(self, content: AssistantParser) -> None:
        self._content = content
        self._held = ""
        self._at_start = True
        self._tagged = False

    def push(self, text: str) -> list[AssistantPart]:
        self._held += text
        if self._at_start:
            stripped = self._held.lstrip()
            if _RESPONSE.startswith(stripped) and stripped != _RESPONSE:
                return []
            self._at_start = False
            self._tagged = stripped.startswith(_RESPONSE)
            if self._tagged:
                self._held = stripped.removeprefix(_RESPONSE)
        if not self._tagged:
            return self._pass_on(len(self._held))
        end = self._held.find(_RESPONSE_END)
        if end >= 0:
            parts = self._pass_on(end)
            self._held = self._held.removeprefix(_RESPONSE_END)
            self._tagged = False
            return parts + self._pass_on(len(self._held))
        return self._pass_on(len(self._held) - prefix_at_end(self._held, _RESPONSE_END))

    def close(self) -> list[AssistantPart]:
        return self._pass_on(len(self._held)) + self._content.close()

    def _pass_on(self, size: int) -> list[AssistantPart]:
        text, self._held = self._held[:size], self._held[size:]
        return self._content.push(text)
