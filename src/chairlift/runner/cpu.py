"""Plan -> tensors -> logits -> tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from chairlift.attention import AttentionBackend, KVStorage
from chairlift.attention.base import Attend
from chairlift.core.plan import Chunk, StepPlan, StepResult, StepTiming
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.models.input_batch import InputBatch, build_batch
from chairlift.models.torch_threads import few_threads
from chairlift.runner.host_blocks import HostBlocks, make_copies
from chairlift.sampling.beams import beam_candidates
from chairlift.sampling.sampler import Sampler
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.speculation.networks import ComputedBatch
from chairlift.structured.output import StructuredOutput


class ModelRunner:
    """Runs a plan as one ragged forward pass and one batched sampling.

    What lasts longer than a step (the KV tensors, each request's sampling state) lives here; what belongs to one
    step is built anew from its plan.
    """

    finds_candidates = True

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        storage: KVStorage,
        structured: StructuredOutput | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        self.structured = structured
        self.drafter: NetworkProposer | None = None  # what guesses, if it is a network
        self.host: HostBlocks | None = None  # where preempted requests leave their blocks, if anywhere
        self.one_by_one = bool(getattr(model, "batch_invariant", False))  # rows are sampled
        self.sampler = Sampler(model.vocab_size, model.device, one_by_one=self.one_by_one)

    def run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), few_threads(self.model, self.attention):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        make_copies(plan, self.storage, self.host)
        batch = build_batch(plan, self.storage, self.model.device, rectangular=self.attention.rectangular)
        attend = self.attention.plan(batch.layout, self.storage)
        built = time.perf_counter()
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        drafts = [chunk.drafts for chunk in plan.chunks if chunk.samples]
        masks = self.structured.begin_masks(sampling, drafts) if self.structured else None  # computed meanwhile
        rows = batch.sampled_rows if self.drafter is None else None  # a network that guesses reads all of them
        hidden = self.model.hidden_states(batch.tokens, batch.positions, attend, rows)
        if not sampling:
            self._show_drafter(plan, batch, attend, hidden, {})
            timing = StepTiming(built - begun, time.perf_counter() - built)
            return StepResult(plan, [], [], timing, batch.num_padding)
        num_scored = len(sampling) + plan.num_drafts  # the rows of idle seats come last
        scored = hidden.last if rows is not None else hidden.last[batch.sampled_rows]
        logits = self.model.logits(scored)[:num_scored].float()
        forwarded = time.perf_counter()
        candidates = beam_candidates(plan.chunks, logits, one_by_one=self.one_by_one)  # before the sampler changes them
        for request in sampling:
            self.sampler.follow(request)
        sampled = self.sampler.sample(
            logits,
            [request.id for request in sampling],
            [request.num_output for request in sampling],
            masks.wait() if masks else None,
            drafts if plan.num_drafts else None,
            [self.drafter.drawn_from(request.id) for request in sampling] if self.drafter and plan.num_drafts else None,
        )
        accepted = {request.id: count for request, count in zip(sampling, sampled.accepted, strict=False) if count}
        self._show_drafter(plan, batch, attend, hidden, accepted)
        timing = StepTiming(built - begun, forwarded - built, time.perf_counter() - forwarded)
        return StepResult(plan, sampled.tokens, sampled.logprobs, timing, batch.num_padding, accepted, candidates)

    def _show_drafter(
        self, plan: StepPlan, batch: InputBatch, attend: Attend, hidden: HiddenStates, accepted: Mapping[str, int]
    ) -> None:
        if self.drafter is not None:
            self.drafter.network.follow(ComputedBatch(plan, batch, attend, hidden, accepted, self.storage))

    def warm_up(self) -> None:
        """Compile what is compiled on first use, so that the first request does not wait for it. Runs one token
        against block 0, which nobody holds yet."""
        request = Request("warm-up", [0], SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
        self.run(StepPlan(step=0, chunks=(Chunk(request, start=0, count=1, table=[0], samples=True),)))
        self.forget(request.id)
        if self.drafter is not None:
            self.drafter.warm_up(request)
            self.drafter.forget(request.id)

    def forget(self, request_id: str) -> None:
        """A request is over, or its steps were lost: drop its sampling state."""
        self.sampler.forget(request_id)
