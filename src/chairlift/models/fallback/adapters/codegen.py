"""CodeGen, whose attention is GPT-J's with fused projections."""

from __future__ import annotations

from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.fallback.adapters.gptj import GPTJAdapter


@ADAPTERS.register("codegen")
class CodeGenAdapter(GPTJAdapter):
    attention_class = "CodeGenAttention"
