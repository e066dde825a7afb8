"""Magistral: [THINK] … [/THINK]."""

from __future__ import annotations

from chairlift.text.reasoning_formats.base import REASONING_FORMATS, ReasoningFormat

BEGIN, END = "[THINK]", "[/THINK]"


@REASONING_FORMATS.register("mistral")
class MagistralFormat(ReasoningFormat):
    begins = (BEGIN,)
    ends = (END,)
    order = 20

    @staticmethod
    def recognises(template: str) -> bool:
        return END in template
