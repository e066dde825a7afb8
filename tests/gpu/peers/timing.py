"""Times steps one after the other, several times, so that a change of the GPU's clock meets all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]


def captured(step: Step) -> Step:
    """Capture a step that has run before; the result replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def microseconds(steps: dict[str, Step], *, rounds: int, repeats: int) -> dict[str, float]:
    """The median over all rounds of the mean time of a step within a round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                step()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / repeats)
    return {name: statistics.median(times) for name, times in found.items()}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the norm of all elements."""
    return float((found.double() - expected).norm() / expected.norm())


class Report:
    """Rows of figures, written after each one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.path.write_text(json.dumps(self.rows, indent=1))
        print("  ".join(f"{name} {_shown(value)}" for name, value in row.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
