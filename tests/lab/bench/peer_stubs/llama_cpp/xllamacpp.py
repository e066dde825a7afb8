"""A stub of the package xllamacpp: a server that reports two tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stub_log import log


class CommonParams:
    def __init__(self) -> None:
        self.model, self.cpuparams, self.cpuparams_batch = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()


class Server:
    def __init__(self, params: CommonParams) -> None:
        log(options=params)

    def handle_completions(self, body: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        log(request=body)
        for count in range(0, body["n_predict"], 2):
            take({"content": "", "timings": {"predicted_n": min(count + 2, body["n_predict"])}})
        take({"stop": True})
