"""Command: <|START_THINKING|> … <|END_THINKING|><|START_RESPONSE|> … <|END_RESPONSE|>."""

from __future__ import annotations

from chairlift.text.reasoning_formats.base import REASONING_FORMATS, ReasoningFormat
from chairlift.text.tools.call_grammar import Marker

BEGIN, END, RESPONSE = "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"


@REASONING_FORMATS.register("cohere")
class CohereReasoning(ReasoningFormat):
    """The markers around the response are special tokens, which the text does not contain."""

    begins = (BEGIN,)
    ends = (END,)
    order = 5

    @staticmethod
    def recognises(template: str) -> bool:
        return END in template

    def answer_header(self, marker: Marker) -> str:
        return f"{marker(RESPONSE)}" if RESPONSE in self.template else ""
