"""A stub of the package vllm: an engine that generates a token of every request per step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stub_log import log


class EngineArgs(SimpleNamespace):
    pass


class SamplingParams(SimpleNamespace):
    pass


class LLMEngine:
    def __init__(self) -> None:
        self._missing: dict[str, int] = {}

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        log(options=args)
        return cls()

    def add_request(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        log(request=vars(params) | {"prompt": prompt["prompt_token_ids"]})
        self._missing[name] = params.max_tokens

    def step(self) -> list[Any]:
        outputs = [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])]) for name in self._missing]
        self._missing = {name: count - 1 for name, count in self._missing.items() if count > 1}
        return outputs
