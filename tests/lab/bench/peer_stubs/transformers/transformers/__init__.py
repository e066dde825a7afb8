"""A stub of the package transformers: a manager that returns each request when it is complete."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from stub_log import log


class GenerationConfig(SimpleNamespace):
    pass


class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, path: Any, **options: Any) -> AutoModelForCausalLM:
        log(loaded={"path": str(path), **options})
        return cls()

    def to(self, device: str) -> AutoModelForCausalLM:
        return self

    def eval(self) -> AutoModelForCausalLM:
        return self

    def init_continuous_batching(self, *, generation_config: Any, continuous_batching_config: Any) -> Manager:
        log(options=vars(generation_config) | vars(continuous_batching_config))
        return Manager()


class Manager:
    def __init__(self) -> None:
        self._results: list[Any] = []

    def start(self) -> None:
        pass

    def add_request(self, prompt: list[int], *, request_id: str, max_new_tokens: int, **options: Any) -> None:
        log(request={"prompt": prompt, "max_new_tokens": max_new_tokens} | options)
        times = [time.perf_counter() for _ in range(max_new_tokens)]
        self._results.append(SimpleNamespace(request_id=request_id, error=None, timestamps=times))

    def get_result(self, timeout: float) -> Any:
        return self._results.pop(0) if self._results else None

    def is_running(self) -> bool:
        return True

    def stop(self, *, block: bool, timeout: float) -> None:
        log(stopped=True)
