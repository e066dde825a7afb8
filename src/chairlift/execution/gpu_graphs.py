"""Captured steps: all kernels of a shape, started by one call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from chairlift.execution.gpu_batch import BatchShape
from chairlift.execution.gpu_step import ComputedStep

log = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class Graph:
    graph: Any
    step: ComputedStep

    def replay(self) -> ComputedStep:
        self.graph.replay()
        return self.step


class Graphs:
    def __init__(self, prepare: Callable[[BatchShape], None], forward: Callable[[BatchShape], ComputedStep]) -> None:
        """`forward` computes a step of a shape; `prepare` computes one for nobody, which compiles what is not."""
        self._prepare = prepare
        self._forward = forward
        self._captured: dict[BatchShape, Graph] = {}
        self._pool: Any = None

    def find(self, shape: BatchShape) -> Graph:
        return self._captured.get(shape) or self.capture(shape)

    @torch.inference_mode()
    def capture(self, shape: BatchShape) -> Graph:
        if shape in self._captured:
            return self._captured[shape]
        self._prepare(shape)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step = self._forward(shape)
        self._captured[shape] = Graph(graph, step)
        return self._captured[shape]
