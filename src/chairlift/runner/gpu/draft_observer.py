"""Lets a draft network read what the model computed in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.kernels.graphs import kernels_for
from chairlift.runner.gpu.step import ComputedStep, LaunchedStep
from chairlift.speculation.draft_network import ComputedBatch, ModelProposer


class DraftObserver:
    """Gives each step to the network of a proposer, before the next step overwrites it."""

    def __init__(
        self,
        drafter: ModelProposer,
        storage: KVStorage,
    ) -> None:
        self._drafter = drafter
        self._storage = storage

    def observe(self, launched: LaunchedStep, step: ComputedStep) -> None:
        """Waits for a step with drafts: the network must not read what followed a wrong one."""
        plan, packed = launched.plan, launched.packed
        accepted = launched.result().accepted if plan.num_drafts else {}
        order = np.argsort(packed.first_rows).tolist()
        plan = replace(plan, chunks=tuple(plan.chunks[index] for index in order))
        self._observe(plan, packed.first_rows[order].tolist(), step, accepted)

    def observe_padding(self, step: ComputedStep) -> None:
        """Observe a step of padding as if it were a prompt: what that takes is part of the step's memory."""
        assert step.output is not None
        count = len(step.output.batch.tokens)
        request = Request("padding", [0] * count, SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunk = Chunk(request, start=0, count=count, table=[], samples=False)
        self._observe(StepPlan(step=0, chunks=(chunk,)), [0], step, {})
        self._drafter.forget(request.id)

    def bytes_kept(self, num_requests: int) -> int:
        """Device memory that the network keeps from step to step, beside the KV storage."""
        return self._drafter.state_bytes(num_requests)

    def _observe(
        self,
        plan: StepPlan,
        offsets: Sequence[int],
        step: ComputedStep,
        accepted: Mapping[str, int],
    ) -> None:
        """`offsets`: the first row of each chunk."""
        assert step.output is not None
        output = step.output
        with kernels_for(tuned=False):  # the number of rows varies, and no request waits for a compilation
            self._drafter.observe_step(
                ComputedBatch(plan, output.batch, offsets, output.attention, output.hidden, accepted, self._storage)
            )
