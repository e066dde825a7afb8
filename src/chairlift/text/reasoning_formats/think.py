"""Qwen3, DeepSeek, SmolLM3, GLM, Kimi, MiniMax and many others: <think> … </think>."""

from __future__ import annotations

from chairlift.text.reasoning_formats.base import REASONING_FORMATS, ReasoningFormat

BEGIN, END = "<think>", "</think>"


@REASONING_FORMATS.register("think")
class ThinkFormat(ReasoningFormat):
    begins = (BEGIN,)
    ends = (END,)

    @staticmethod
    def recognises(template: str) -> bool:
        return END in template
