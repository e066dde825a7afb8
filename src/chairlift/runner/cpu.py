"""The runner of a CPU: every step is computed when it is launched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from chairlift.attention.batch import StepBatch, build_batch
from chairlift.attention.interface import StepAttention
from chairlift.core.executor import ExecutorCapabilities, FinishedStep
from chairlift.core.plan import NO_PROMPT_OUTPUTS, Chunk, StepPlan, StepResult, StepTiming
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.models.base import HiddenStates
from chairlift.models.programs.base import limit_torch_threads
from chairlift.runner.base import ModelRunner
from chairlift.runner.memory import make_copies
from chairlift.sampling.sampler import beam_candidates
from chairlift.speculation.drafter import ComputedBatch


class CPURunner(ModelRunner):
    """Computes a plan at once, as one ragged forward pass and one batched sampling.

    Also runs on a GPU, with any attention backend, but kernel by kernel and without working ahead.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(beam_search=True, hidden_size=self.model.hidden_size)

    def launch(self, plan: StepPlan) -> FinishedStep:
        encode_seconds = 0.0
        with torch.inference_mode():
            if self.images is not None and (plan.encoding.works or plan.encoding.drops):
                encode_seconds = self.images.encode(plan.encoding)
            if not plan.chunks:
                timing = StepTiming(encode=encode_seconds)
                return FinishedStep(StepResult(plan, [], [], timing, bad_images=self._bad_images))
            with limit_torch_threads(self.model, self.attention):
                result = self._compute(plan)
        if encode_seconds:
            timing = replace(result.timing, encode=encode_seconds)
            result = replace(result, timing=timing, bad_images=self._bad_images)
        return FinishedStep(result)

    @property
    def _bad_images(self) -> Mapping[bytes, str]:
        """Why images of the last step could not be encoded."""
        return {} if self.images is None else dict(self.images.bad)

    def _compute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        make_copies(plan, self.storage, self.host_blocks)
        rectangular = self.attention.capabilities.rectangular
        batch = build_batch(plan, self.storage, self.model.device, states=self.states, rectangular=rectangular)
        batch = batch if self.images is None else self.images.place(plan, batch)
        attention = self.attention.begin(batch, self.storage)
        if self.images is not None:
            attention = self.images.attention(attention, batch, self.storage)
        built = time.perf_counter()
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        masks = self._begin_masks(sampling)  # computed while the model runs
        needed = batch.needed_rows
        rows = None if self.drafter.reads_rows else needed
        hidden = self.model.hidden_states(batch, attention, rows)
        kept = hidden.last if rows is needed else hidden.last[needed]
        assert batch.sampled_rows is not None
        num_sampled = len(batch.sampled_rows)
        prompts = self.prompt_reader.read(plan.chunks, kept[num_sampled:]) if plan.reads else NO_PROMPT_OUTPUTS
        if not sampling:
            self._observe(plan, batch, attention, hidden, {})
            timing = StepTiming(built - start, time.perf_counter() - built)
            return StepResult(plan, [], [], timing, batch.num_padding, prompts=prompts)
        num_scored = len(sampling) + plan.num_drafts  # idle rows come last
        logits = self.model.logits(kept[:num_sampled])[:num_scored].float()
        forwarded = time.perf_counter()
        candidates = beam_candidates(plan.chunks, logits, one_by_one=self.one_by_one)  # The sampler edits logits.
        sampled = self._sample(sampling, logits, masks)
        accepted = {chunk.request.id: count for chunk, count in zip(sampling, sampled.accepted, strict=False) if count}
        self._observe(plan, batch, attention, hidden, accepted)
        timing = StepTiming(built - start, forwarded - built, time.perf_counter() - forwarded)
        return StepResult(
            plan, sampled.tokens, sampled.logprobs, timing, batch.num_padding, accepted, candidates, prompts
        )

    def _observe(
        self,
        plan: StepPlan,
        batch: StepBatch,
        attention: StepAttention,
        hidden: HiddenStates,
        accepted: Mapping[str, int],
    ) -> None:
        """Let a drafter read what the model computed."""
        if self.drafter.reads_rows:
            rows = batch.layout.offsets
            self.drafter.after(ComputedBatch(plan, batch, rows, attention, hidden, lambda: accepted))

    def warm_up(self) -> None:
        """Run one token on block 0, which is still free, to compile what is compiled on first use."""
        request = Request("warm-up", [0], SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
        beside = ([0],) * (self.storage.num_tables - 1)
        self.run(StepPlan(step=0, chunks=(Chunk(request, 0, 1, table=[0], samples=True, beside=beside),)))
        self.forget(request.id)
        self._warm_up_drafter(request)
