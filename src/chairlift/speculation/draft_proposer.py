"""A proposer that runs a draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.batch import StepBatch, build_batch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.paged.slots import Slots
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.randomness import uniform
from chairlift.kernels.graphs import kernels_for
from chairlift.models.base import CausalLM, HiddenStates
from chairlift.models.programs.base import limit_torch_threads
from chairlift.sampling.draw import draw, filter_probabilities, filters_of
from chairlift.speculation.draft_passes import DraftPasses
from chairlift.speculation.drafter import ComputedBatch, Drafter, DraftNetwork, DraftTask
from chairlift.speculation.head_states import KEPT, LENGTH, RecentStates
from chairlift.speculation.proposers.base import A_FEW, LEVELS, Draft, DraftTerms, Proposer, is_greedy

MAX_LENGTH = A_FEW - 1
MAX_CATCH_UP_TOKENS = 256  # Requests further behind share these tokens of one step.
# Requests of one catch-up pass. A draft head has up to 64 tokens of each: no more in all than any GPU's largest step,
# whose memory was measured.
CATCH_UP_REQUESTS = 32


@dataclass(eq=False, repr=False)
class DraftModelProposer(Proposer, Drafter):
    """Drafts for all requests at once, one pass of the network per place, as long as any request's draft is likely
    enough to be right.

    Unless it is `repeatable`, drafts for requests that sample without a seed are sampled, too: more are accepted, but
    the output then depends on the drafts, and so on the batch. Other requests get the likeliest tokens.
    """

    reads_rows = True

    name: str
    network: DraftNetwork
    attention: AttentionBackend
    storage: KVStorage
    target: CausalLM
    repeatable: bool
    _: KW_ONLY
    layers: Sequence[AttentionLayer] = ()
    max_length: int = MAX_LENGTH

    def __post_init__(self) -> None:
        for layer in self.layers:  # what is read before it is written must at least be numbers
            self.storage.keys[layer.index].zero_()
            self.storage.values[layer.index].zero_()
        self._sampled_from: dict[str, list[Tensor]] = {}  # What the last drafts were drawn from, by request id.
        self._last_state: dict[str, Tensor] = {}  # The network's own state of the last draft token, by request id.
        # Passes that are not captured are launched in this context.
        self._kernels: Callable[[], AbstractContextManager[None]] = nullcontext
        self._recent: RecentStates | None = None  # The runner's steps store there what the network reads.
        self._passes: DraftPasses | None = None

    # ---- beside a runner --------------------------------------------------------------------------------------------

    def attach(self, slots: Slots, max_drafts: int, has_room: Callable[[int], bool] | None) -> None:
        self._kernels = partial(kernels_for, tuned=False)  # the number of rows varies: no pass waits for a compilation
        self._recent = self.network.attach(slots)
        assert self._recent is None or self.max_length < LENGTH - KEPT
        if has_room is not None:
            places = min(max_drafts, self.max_length)
            network, recent = self.network, self._recent
            self._passes = DraftPasses(network, self.attention, self.storage, slots, recent, places, has_room)
            self.graphs = self._passes.graphs

    def begin(self, plan: StepPlan, first_rows: np.ndarray, views: Mapping[str, np.ndarray]) -> None:
        if self._recent is not None:
            self._recent.begin(plan, first_rows, views)

    def store(
        self, batch: StepBatch, view: Mapping[str, Tensor], attention: StepAttention, hidden: HiddenStates
    ) -> None:
        if self._recent is not None:
            self._recent.store(batch, view, attention, hidden)

    def after(self, step: ComputedBatch) -> None:
        if self._recent is None:
            with self._kernels():
                self.network.observe_step(step, self.storage)

    def release(self) -> int:
        return 0 if self._recent is None else self._recent.release()

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def warm_up(self, request: Request) -> None:
        terms = DraftTerms(2, 0.0, 0.0, {}, lambda request, length: None)
        table = [0] * (request.num_known + 2)
        self._run([DraftTask(request, 2, table, 0.0, 0.0, [1.0] * LEVELS)], terms)

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft]:
        tasks = []
        for request in requests:
            table = terms.reserve(request)
            if table is not None:
                least = terms.min_chance, terms.min_chance_to_extend
                tasks.append(DraftTask(request, terms.length(request), table, *least, terms.chances_for(request)))
        self._sampled_from = {}
        drafts = self._run(tasks, terms) if tasks else []
        by_request = {task.request.id: draft for task, draft in zip(tasks, drafts, strict=True)}
        return [by_request.get(request.id, Draft((), ())) for request in requests]

    def _run(self, tasks: Sequence[DraftTask], terms: DraftTerms) -> list[Draft]:
        with torch.inference_mode(), limit_torch_threads(self.target, self.attention):
            self.network.begin_draft([task.table for task in tasks], self.storage)
            # All tokens are drafted in one call if nothing has to be done between two of a request.
            at_once = self.network.one_call is not None and self.attention.capabilities.has_work
            if at_once and not any(self._is_sampled(task.request) for task in tasks):
                return self._draft_at_once(tasks, terms)
            ready = self._catch_up(tasks, terms)
            captured = self._draft_captured([tasks[index] for index in ready], terms)
            if captured is None:
                return self._draft_by_places(tasks, ready)
            drafts = dict(zip(ready, captured, strict=True))
            return [drafts.get(index, Draft((), ())) for index in range(len(tasks))]

    def _draft_captured(self, tasks: Sequence[DraftTask], terms: DraftTerms) -> list[Draft] | None:
        """All places at once; None if that is not possible. The controller drops what is not likely enough."""
        if self._passes is None or not tasks or any(self._is_sampled(task.request) for task in tasks):
            return None
        terms.was_prepared = self._passes.is_typical(len(tasks))
        return self._passes.draft(tasks)

    def _draft_by_places(self, tasks: Sequence[DraftTask], ready: Sequence[int]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in tasks]
        levels: list[list[int]] = [[] for _ in tasks]
        likely = [1.0] * len(tasks)
        for place in range(max((tasks[index].length for index in ready), default=0)):
            active = [index for index in ready if tasks[index].length > place == len(tokens[index])]
            if place and not any(likely[index] >= tasks[index].min_chance_to_extend for index in active):
                break
            choices = self._pass([self._chunk(tasks[index], tokens[index]) for index in active])
            for index, token, level in zip(active, *choices, strict=True):
                task = tasks[index]
                likely[index] *= task.chances[level]
                # A sampled draft token is dropped because of the distribution it was sampled from, never because of the
                # token: otherwise the output would not be distributed as the target's.
                if likely[index] >= task.min_chance:
                    tokens[index].append(token)
                    levels[index].append(level)
                elif task.request.id in self._sampled_from:
                    self._sampled_from[task.request.id].pop()  # it is as long as the vocabulary
        return [Draft(some, sure) for some, sure in zip(tokens, levels, strict=True)]

    def _draft_at_once(self, tasks: Sequence[DraftTask], terms: DraftTerms) -> list[Draft]:
        terms.did_extra_work = self.network.catch_up(tasks, self.storage)
        order = sorted(range(len(tasks)), key=lambda index: -tasks[index].length)
        drafts = self.network.draft([tasks[index] for index in order], self.storage)
        return [draft for _, draft in sorted(zip(order, drafts, strict=True), key=lambda pair: pair[0])]

    def _catch_up(self, tasks: Sequence[DraftTask], terms: DraftTerms) -> list[int]:
        """Compute tokens of a pause in passes of their own; return the indices of the requests that are ready.

        The others are too far behind for one step: catching up goes on in the next ones."""
        first_position = self.network.first_position
        if all(task.request.num_known - first_position(task.request) <= A_FEW for task in tasks):  # most steps
            return [*range(len(tasks))]
        chunks = [self._chunk(task, ()) for task in tasks]
        ready, missed = [], []
        room = MAX_CATCH_UP_TOKENS if self.network.catches_up_in_parts else sum(chunk.count for chunk in chunks)
        for index, chunk in sorted(enumerate(chunks), key=lambda item: item[1].count):
            if chunk.count > A_FEW:
                count = min(chunk.count - 1, room)  # the last one comes with the first draft token
                room -= count
                if count:
                    missed.append(replace(chunk, count=count))
                if count < chunk.count - 1:
                    break  # the others are still further behind
            ready.append(index)
        for first in range(0, len(missed), CATCH_UP_REQUESTS):
            self._scores(missed[first : first + CATCH_UP_REQUESTS])
        terms.did_extra_work = bool(missed)
        return sorted(ready)

    def _chunk(self, task: DraftTask, drafts: Sequence[int]) -> Chunk:
        request = task.request
        if not drafts:
            start = self.network.first_position(request)
            return Chunk(request, start, request.num_known - start, task.table, samples=False)
        start = request.num_known + len(drafts) - 1
        return Chunk(request, start, 1, task.table, samples=False, drafts=(drafts[-1],))

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """A draft token for each chunk, and the level of confidence in the likeliest one."""
        scores = self._scores(chunks)
        highest = (scores.amax(dim=-1).float() - scores.float().logsumexp(dim=-1)).exp().nan_to_num()
        levels = (LEVELS * highest).long().clamp_(max=LEVELS - 1)
        tokens, sure = torch.stack((self._choose(scores, chunks), levels)).tolist()  # one wait for the device
        return tokens, sure

    def _scores(self, chunks: Sequence[Chunk]) -> Tensor:
        """Scores of what may follow each chunk [chunks, R]. Either all of them are draft tokens or none."""
        device, network = self.storage.keys[0].device, self.network
        plan = StepPlan(step=0, chunks=tuple(chunks))
        batch = build_batch(plan, self.storage, device, rectangular=self.attention.capabilities.rectangular)
        attention = self.attention.begin(batch, self.storage)
        with self._kernels():
            if chunks[0].drafts:
                states = [self._last_state[chunk.request.id] for chunk in chunks if self._last_state]
                computed = network.run_pass(batch, torch.stack(states) if states else None, None, attention)
            else:
                spans = [
                    range(first, first + chunk.count)
                    for first, chunk in zip(batch.layout.offsets, chunks, strict=False)
                ]
                last_rows = sent([span[-1] for span in spans], device)
                computed = network.run_pass(batch, self._features(batch, chunks, spans), last_rows, attention)
        for index, chunk in enumerate(chunks):
            network.computed(chunk.request, chunk.end)
            if computed.states is not None:
                self._last_state[chunk.request.id] = computed.states[index]
        return computed.scores

    def _features(self, batch: StepBatch, chunks: Sequence[Chunk], spans: Sequence[range]) -> Tensor | None:
        """What the network reads beside the tokens of a batch, whose chunks have these rows."""
        if self.network.states is None:
            return None
        known = self.network.states.take([(chunk.request, chunk.count) for chunk in chunks])
        features = torch.zeros(len(batch.tokens), known.shape[1], dtype=known.dtype, device=known.device)
        return features.index_copy_(0, sent([row for span in spans for row in span], known.device), known)

    def _choose(self, scores: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        ids = self.network.token_ids
        tokens = scores.argmax(dim=-1)
        sampling = [index for index, chunk in enumerate(chunks) if self._is_sampled(chunk.request)]
        if sampling:
            requests = [chunks[index].request for index in sampling]
            weights = _probabilities(scores[sampling], [request.params for request in requests])
            places = [chunks[index].end - chunks[index].request.num_prompt for index in sampling]
            uniforms = [uniform(request.seed, place, stream=1) for request, place in zip(requests, places, strict=True)]
            tokens[sampling] = draw(weights, uniforms)
            for request, row in zip(requests, self._over_vocabulary(weights), strict=True):
                self._sampled_from.setdefault(request.id, []).append(row)
        return tokens if ids is None else ids[tokens]

    def _is_sampled(self, request: Request) -> bool:
        # A draft token that a grammar forbids is dropped before it is verified, which only the likeliest one allows: a
        # sampled one would have to be rejected, so that another is sampled from the rest of the distribution.
        params = request.params
        return not self.repeatable and params.seed is None and params.structure is None and not is_greedy(request)

    def _over_vocabulary(self, weights: Tensor) -> Tensor:
        """Probabilities over all tokens of the target, zero for those that the network does not score."""
        whole = torch.zeros(len(weights), self.target.vocab_size, device=weights.device)
        if self.network.token_ids is None:
            whole[:, : weights.shape[1]] = weights
        else:
            whole[:, self.network.token_ids] = weights
        return whole

    def sampled_from(self, request_id: str) -> Tensor | None:
        rows = self._sampled_from.get(request_id)
        return torch.stack(rows) if rows else None

    def forget(self, request_id: str) -> None:
        self.network.forget(request_id)
        self._last_state.pop(request_id, None)
        self._sampled_from.pop(request_id, None)


def _probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distributions that the requests sample from, without penalties and the like, which drafts can do without."""
    temperatures = torch.tensor([each.temperature for each in params], device=scores.device)
    weights = (scores.float().nan_to_num() / temperatures[:, None]).softmax(dim=-1)
    filter_probabilities(weights, [filters_of(each) for each in params])
    return weights / weights.sum(dim=-1, keepdim=True)
