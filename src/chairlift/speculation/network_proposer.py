"""A proposer that asks a network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.input_batch import build_batch
from chairlift.attention.storage import KVStorage, sent
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.randomness import uniform
from chairlift.core.request import Request
from chairlift.core.sampling_params import MIN_TEMPERATURE, SamplingParams
from chairlift.models.base import CausalLM
from chairlift.models.stacks.torch_threads import limit_torch_threads
from chairlift.sampling.draw import draw
from chairlift.sampling.filters import filter_probabilities, filters_of
from chairlift.speculation.control.confidence import LEVELS, Confidence
from chairlift.speculation.control.controller import Wanted
from chairlift.speculation.head_config import MOST_ASKED
from chairlift.speculation.head_network import Head
from chairlift.speculation.networks import A_FEW, DraftNetwork

MAX_LENGTH = A_FEW - 1
MOST_MISSED = 256  # tokens of requests further behind that a network catches up with in one step
# Requests of one pass. A draft head has up to 64 tokens of each: no more in all than any GPU's largest step, which it
# was shown when memory was measured.
CAUGHT_UP_AT_ONCE = 32
_GAIN = 0.1  # how far one measurement moves the estimate of what a pass takes
_AT_MOST = 1.5  # times the last measurement


class NetworkProposer:
    """Guesses for all requests at once, one pass of the network for each place, as long as there is one whose guesses
    are likely enough to be right."""

    judges = True

    def __init__(
        self,
        name: str,
        network: DraftNetwork,
        attention: AttentionBackend,
        storage: KVStorage,
        target: CausalLM,
        *,
        draws: bool = True,
    ) -> None:
        """With `draws`, requests that are sampled without a seed of their own get guesses that are drawn, too: more of
        them can be kept, but which tokens come out then depends on which were guessed, and so on the batch. The others
        get the likeliest tokens."""
        self.name = name
        self.network = network
        self.sleeps = isinstance(network, Head)
        self._asleep = False
        self.max_length = MOST_ASKED if isinstance(network, Head) else MAX_LENGTH
        self._target = target
        self._draws = draws
        self._drawn_from: dict[str, list[Tensor]] = {}  # of the last drafts, by request id
        self._attention = attention
        self._storage = storage
        self.spent = self.catching_up = 0.0
        self._pass_seconds: dict[int, float] = {}  # by the size of the batch, in powers of two
        # By whether the target takes its likeliest token: else it agrees less often with the likeliest guess.
        self._confidence = {True: Confidence(), False: Confidence()}
        self._levels: dict[str, list[int]] = {}  # by request id: how sure the network was of its last guesses

    @property
    def asleep(self) -> bool:
        return self._asleep

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self._asleep = value
        if isinstance(self.network, Head):
            self.network.asleep = value

    def warm_up(self, request: Request) -> None:
        """As the runner's own, for this request of one token in block 0. The time that compiling takes says nothing."""
        self.propose([Wanted(request, 2, [0, 0])])
        self._pass_seconds.clear()

    def foresee(self, requests: Sequence[Request]) -> Sequence[int | None]:
        return [0] * len(requests)

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        with torch.inference_mode(), limit_torch_threads(self._target, self._attention):
            drafts = self._propose(wanted)
        for one, found in zip(wanted, drafts, strict=True):
            if not found:
                self._confidence[_is_greedy(one.request.params)].fade()
        return drafts

    def _propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in wanted]
        self._drawn_from, self._levels = {}, {}
        self.catching_up = 0.0
        chances = {greedy: known.chances for greedy, known in self._confidence.items()}
        if self._can_guess_at_once(wanted):
            drafts = self._guess_at_once(wanted, chances)
            self.spent = time.perf_counter() - started
            return drafts
        ready = self._catch_up(wanted)
        likely = [1.0] * len(wanted)
        for place in range(max((wanted[index].length for index in ready), default=0)):
            asked = [index for index in ready if wanted[index].length > place == len(drafts[index])]
            if place and not any(likely[index] >= wanted[index].least_to_go_on for index in asked):
                break
            begun = time.perf_counter()
            found = self._pass([self._chunk(wanted[index], drafts[index]) for index in asked])
            if place:  # the first one may have more to compute than one token each
                self._note_seconds(len(asked), time.perf_counter() - begun)
            for index, token, level in zip(asked, *found, strict=True):
                request = wanted[index].request
                likely[index] *= chances[_is_greedy(request.params)][level]
                # A guess that was drawn is left out because of what it was drawn from, and never for what it is: then
                # what comes out would not be distributed as the target says.
                if likely[index] >= wanted[index].least:
                    drafts[index].append(token)
                    self._levels.setdefault(request.id, []).append(level)
                elif request.id in self._drawn_from:
                    self._drawn_from[request.id].pop()  # which is as long as the vocabulary
        self.spent = time.perf_counter() - started if ready else self.catching_up
        return drafts

    def _can_guess_at_once(self, wanted: Sequence[Wanted]) -> bool:
        """Whether nothing has to be done between two guesses of a request."""
        one_call = isinstance(self.network, Head) and self.network.one_call
        drawn = any(self._is_drawn(one.request.params) for one in wanted)
        return one_call and self._attention.capabilities.host_attend and not drawn

    def _guess_at_once(self, wanted: Sequence[Wanted], chances: Mapping[bool, list[float]]) -> list[list[int]]:
        assert isinstance(self.network, Head)
        begun = time.perf_counter()
        if self.network.catch_up(wanted, self._storage):
            self.catching_up = time.perf_counter() - begun
        order = sorted(range(len(wanted)), key=lambda index: -wanted[index].length)
        in_order = [wanted[index] for index in order]
        known = [chances[_is_greedy(one.request.params)] for one in in_order]
        found, pass_seconds = self.network.guess(in_order, known, self._storage)
        if pass_seconds is not None:
            self._note_seconds(len(wanted), pass_seconds)
        drafts: list[list[int]] = [[] for _ in wanted]
        for index, guesses in zip(order, found, strict=True):
            drafts[index] = guesses.tokens
            self._levels[wanted[index].request.id] = guesses.levels
        return drafts

    def _catch_up(self, wanted: Sequence[Wanted]) -> list[int]:
        """The indices of those for whom the network can guess now. Others that got no guesses for long have to wait: it
        would have to compute so much that the step took too long. As much of that as fits is computed, in a pass of its
        own: what that takes is no part of what guesses cost."""
        started = time.perf_counter()
        chunks = [self._chunk(one, ()) for one in wanted]
        ready, missed = [], []
        room = MOST_MISSED if self.network.in_parts else sum(chunk.count for chunk in chunks)
        for index, chunk in sorted(enumerate(chunks), key=lambda item: item[1].count):
            if chunk.count > A_FEW:
                count = min(chunk.count - 1, room)  # the last one comes with the first guess
                room -= count
                if count:
                    missed.append(replace(chunk, count=count))
                if count < chunk.count - 1:
                    break  # the others are still further behind
            ready.append(index)
        for first in range(0, len(missed), CAUGHT_UP_AT_ONCE):
            self._scores(missed[first : first + CAUGHT_UP_AT_ONCE])[:, 0].tolist()  # which waits for the device
        if missed:
            self.catching_up = time.perf_counter() - started
        return sorted(ready)

    def _chunk(self, one: Wanted, drafts: Sequence[int]) -> Chunk:
        request = one.request
        if not drafts:
            start = self.network.first_position(request)
            return Chunk(request, start, request.num_known - start, one.table, samples=False)
        start = request.num_known + len(drafts) - 1
        return Chunk(request, start, 1, one.table, samples=False, drafts=(drafts[-1],))

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """A guess for each, and how sure the network is of what is likeliest."""
        scores = self._scores(chunks)
        highest = (scores.amax(dim=-1).float() - scores.float().logsumexp(dim=-1)).exp().nan_to_num()
        levels = (LEVELS * highest).long().clamp_(max=LEVELS - 1)
        tokens, sure = torch.stack((self._choose(scores, chunks), levels)).tolist()  # at once: a device is waited for
        return tokens, sure

    def _scores(self, chunks: Sequence[Chunk]) -> Tensor:
        device = self._storage.keys[0].device
        plan = StepPlan(step=0, chunks=tuple(chunks))
        batch = build_batch(plan, self._storage, device, rectangular=self._attention.capabilities.rectangular)
        rows = [offset + chunk.count - 1 for offset, chunk in zip(batch.layout.offsets, chunks, strict=False)]
        attend = self._attention.plan(batch.layout, self._storage)
        return self.network.scores(batch, chunks, sent(rows, device), attend)

    def _choose(self, scores: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        ids = self.network.token_ids
        tokens = scores.argmax(dim=-1)
        drawing = [index for index, chunk in enumerate(chunks) if self._is_drawn(chunk.request.params)]
        if drawing:
            requests = [chunks[index].request for index in drawing]
            weights = _probabilities(scores[drawing], [request.params for request in requests])
            places = [chunks[index].end - chunks[index].request.num_prompt for index in drawing]
            uniforms = [uniform(request.seed, place, stream=1) for request, place in zip(requests, places, strict=True)]
            tokens[drawing] = draw(weights, uniforms)
            for request, row in zip(requests, self._in_vocabulary(weights), strict=True):
                self._drawn_from.setdefault(request.id, []).append(row)
        return tokens if ids is None else ids[tokens]

    def _is_drawn(self, params: SamplingParams) -> bool:
        # A guess that a grammar forbids is left out before it is verified. Only the likeliest guess allows that: one
        # that was drawn would have to be refused, so that another is drawn from what is left.
        return self._draws and params.seed is None and params.structure is None and not _is_greedy(params)

    def _in_vocabulary(self, weights: Tensor) -> Tensor:
        """Over all tokens of the target: those that the network does not score have none."""
        whole = torch.zeros(len(weights), self._target.vocab_size, device=weights.device)
        if self.network.token_ids is None:
            whole[:, : weights.shape[1]] = weights
        else:
            whole[:, self.network.token_ids] = weights
        return whole

    def drawn_from(self, request_id: str) -> Tensor | None:
        """The probabilities [drafts, vocab] that the last drafts of a request were drawn with, if they were drawn."""
        found = self._drawn_from.get(request_id)
        return torch.stack(found) if found else None

    def _note_seconds(self, num_requests: int, seconds: float) -> None:
        size = num_requests.bit_length()
        before = self._pass_seconds.get(size, seconds)
        # Whatever disturbs a pass makes it slower: a single fast one shows that others were disturbed.
        self._pass_seconds[size] = min(before + _GAIN * (min(seconds, 3 * before) - before), _AT_MOST * seconds)

    def seconds(self, num_requests: int, length: int) -> float:
        if not self._pass_seconds:
            return 0.0
        size = num_requests.bit_length()
        nearest = min(self._pass_seconds, key=lambda known: abs(known - size))
        # Of fewer requests than any pass had so far it takes less: nobody knows how much, and a guess will tell.
        return length * self._pass_seconds[nearest] * min(1.0, 2.0 ** (size - nearest))

    def learn(self, request: Request, proposed: int, accepted: int) -> None:
        levels = self._levels.get(request.id, [])[:proposed]
        self._confidence[_is_greedy(request.params)].learn(levels, accepted)

    def forget(self, request_id: str) -> None:
        self.network.forget(request_id)
        self._drawn_from.pop(request_id, None)
        self._levels.pop(request_id, None)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def _probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """As the requests want their tokens drawn, but for penalties and the like: a guess need not be that good."""
    temperatures = torch.tensor([one.temperature for one in params], device=scores.device)
    weights = (scores.float().nan_to_num() / temperatures[:, None]).softmax(dim=-1)
    filter_probabilities(weights, [filters_of(one) for one in params])
    return weights / weights.sum(dim=-1, keepdim=True)
