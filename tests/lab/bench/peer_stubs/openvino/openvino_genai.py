"""A stub of the package openvino_genai: a pipeline that generates a token of every request per step."""

from __future__ import annotations

from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from openvino import Tensor
from stub_log import log


class SchedulerConfig(SimpleNamespace):
    pass


class GenerationConfig(SimpleNamespace):
    pass


class GenerationStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"


class Handle:
    def __init__(self, tokens: int) -> None:
        self.missing, self.unread = tokens, 0

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        tokens, self.unread = self.unread, 0
        return {0: SimpleNamespace(generated_ids=[7] * tokens)}

    def get_status(self) -> GenerationStatus:
        return GenerationStatus.RUNNING if self.missing else GenerationStatus.FINISHED


class ContinuousBatchingPipeline:
    def __init__(self, model: str, scheduler: SchedulerConfig, device: str, properties: dict[str, Any]) -> None:
        log(options=vars(scheduler) | properties | {"model": model, "device": device})
        self._handles: list[Handle] = []

    def add_request(self, number: int, ids: Tensor, config: GenerationConfig) -> Handle:
        log(request=vars(config) | {"prompt": ids.numbers.tolist()[0]})
        self._handles.append(Handle(config.max_new_tokens))
        return self._handles[-1]

    def step(self) -> None:
        for handle in self._handles:
            if handle.missing:
                handle.missing, handle.unread = handle.missing - 1, handle.unread + 1
