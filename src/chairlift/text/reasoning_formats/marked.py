"""Reasoning between two markers at the start of the output."""

from __future__ import annotations

from chairlift.text.assistant_parts import AssistantParser, AssistantPart
from chairlift.text.reasoning_formats.base import REASONING_FORMATS, Phase, ReasoningFormat
from chairlift.text.tools.call_grammar import Marker
from chairlift.text.tools.reader import first_of


@REASONING_FORMATS.register("think")
class ThinkFormat(ReasoningFormat):
    """Qwen3, DeepSeek, SmolLM3, GLM, Kimi, MiniMax and many others: <think> … </think>."""

    begins, ends = ("<think>",), ("</think>",)


@REASONING_FORMATS.register("mistral")
class MagistralFormat(ReasoningFormat):
    """Magistral: [THINK] … [/THINK]."""

    begins, ends = ("[THINK]",), ("[/THINK]",)
    order = 20


@REASONING_FORMATS.register("cohere")
class CohereReasoning(ReasoningFormat):
    """Command: <|START_THINKING|> … <|END_THINKING|><|START_RESPONSE|> … <|END_RESPONSE|>.

    The markers around the response are special tokens, which the text does not contain.
    """

    begins, ends = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
    order = 5

    def answer_header(self, marker: Marker) -> str:
        response = "<|START_RESPONSE|>"
        return marker(response) if response in self.template else ""


_SENTENCE = "Here is my thought process:"
_RESPONSE, _RESPONSE_END = "<response>", "</response>"
_TAGS = f"{_RESPONSE}{_RESPONSE_END}"  # The template's instructions have these.


@REASONING_FORMATS.register("granite")
class GraniteReasoning(ReasoningFormat):
    """Sentences around the reasoning (3.2), or <think> … </think><response> … </response> (3.3), as plain text."""

    order = 10

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self._tags = _TAGS in template
        if self._tags:
            self.begins, self.ends = ("<think>",), ("</think>",)
        else:
            self.begins = (_SENTENCE, "Here's my thought process:")
            self.ends = ("Here is my response:", "Here's my response:")

    @classmethod
    def recognises(cls, template: str) -> bool:
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
            return self._pass_on()
        before, end, self._held = first_of((_RESPONSE_END,), self._held)
        parts = self._content.push(before)
        if end is None:
            return parts
        self._tagged = False
        return parts + self._pass_on()

    def close(self) -> list[AssistantPart]:
        return self._pass_on() + self._content.close()

    def _pass_on(self) -> list[AssistantPart]:
        text, self._held = self._held, ""
        return self._content.push(text)
