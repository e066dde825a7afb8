"""Beam search for one prompt, as in transformers' `generate(num_beams=…)`, and the requests that carry its beams.

In every step, each beam has candidates for its next token. Continuations of all beams are ranked by the sum of their
log-probabilities. Those that end (a stop token, or the last token allowed) become hypotheses if they are among the
`beam_width` best; the `beam_width` best of the others are the beams of the next step. `BeamSearch` does this,
independent of memory and scheduler; `BeamGroup` maps it to requests.

A search of width w is w requests. Only the first one, the *leader*, waits in the queue; it takes w slots on admission
and computes the prompt. After that each request carries one beam and is computed like any other, in the same ragged
batch. Instead of a sampled token, a step returns *candidates* for each beam. Once all beams of a search have theirs,
the search decides which beams continue:

    beams     a  b  c  d       c has two continuations, d none: the request of d releases its blocks,
                   /|\\         takes a fork of c's block table, and carries c's other continuation.
              a  b c  d        The first write into a shared block copies it.

A preempted search loses the slots and blocks of all its beams at once, but keeps their tokens. When it is admitted
again, the leader recomputes its tokens, and the other beams fork the prefix that they share with it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile

from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.plan import Candidates, TokenLogprobs
from chairlift.core.request import Ending, FinishReason, Request, RequestGroup, Status
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Beam:
    """A token and its parent beam; beams with a common prefix share it."""

    parent: Beam | None  # None for the root, which is the prompt
    token: int
    total: float  # sum of the log-probabilities of all its tokens
    length: int
    scored: TokenLogprobs | None = None  # if logprobs are requested

    def path(self) -> list[Beam]:
        """The beams from the first generated token to this one."""
        path, beam = list[Beam](), self
        while beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended."""

    beam: Beam
    score: float  # total / length ** length_penalty
    ending: Ending


class BeamSearch:
    """The beams of one prompt and the hypotheses found so far."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], max_new_tokens: int) -> None:
        assert params.beam_width is not None
        self.width = params.beam_width
        self.beams = [Beam(parent=None, token=-1, total=0.0, length=0)]  # best first
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self.over = False
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._end_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else eos_ids)  # they end a beam
        # Enough that `width` of them continue even if every beam can end with each of the stop tokens.
        self._num_compared = max(2, 1 + len(self._end_ids)) * self.width

    @property
    def num_candidates(self) -> int:
        """The number of candidates that each beam needs."""
        # Stop tokens that min_tokens does not allow yet are skipped, so more candidates are needed.
        return max(self._num_compared + (len(self._end_ids) if self._too_short else 0), self._params.logprobs or 0)

    @property
    def _too_short(self) -> bool:
        """Whether ending with the next token would violate `min_tokens`."""
        return self.beams[0].length < self._params.min_tokens

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Advance all beams by one token, given their candidates; return the index of the parent of each new beam."""
        compared = nlargest(self._num_compared, self._continuations(candidates), key=lambda entry: entry[0])
        continuing: list[tuple[int, Beam]] = []
        for rank, (total, index, choice) in enumerate(compared):
            parent, token = self.beams[index], candidates[index].ids[choice]
            ending = self._ending(token, parent.length + 1)
            if ending is None and len(continuing) < self.width:
                continuing.append((index, self._grow(parent, candidates[index], choice, total)))
            elif ending is not None and rank < self.width:
                beam = self._grow(parent, candidates[index], choice, total)
                self.finished.append(Hypothesis(beam, self._score(total, beam.length), ending))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        self.beams = [beam for _, beam in continuing]
        self.over = not self.beams or not self._worth_continuing()
        return [index for index, _ in continuing]

    def _continuations(self, choices: Sequence[Candidates]) -> Iterator[tuple[float, int, int]]:
        """Yield (total, beam index, candidate index) of every allowed continuation."""
        banned = self._end_ids if self._too_short else frozenset[int]()
        for index, (beam, candidates) in enumerate(zip(self.beams, choices, strict=True)):
            for choice, (token, logprob) in enumerate(zip(candidates.ids, candidates.logprobs, strict=True)):
                if token not in banned:
                    yield beam.total + logprob, index, choice

    def _grow(self, parent: Beam, candidates: Candidates, choice: int, total: float) -> Beam:
        token, scored = candidates.ids[choice], None
        if self._params.logprobs is not None:
            logprob = candidates.logprobs[choice]
            rank = 1 + bisect_left(candidates.logprobs, -logprob, key=lambda value: -value)
            top = tuple(zip(candidates.ids, candidates.logprobs, strict=True))[: self._params.logprobs]
            scored = TokenLogprobs(token, logprob, rank, top)
        return Beam(parent, token, total, parent.length + 1, scored)

    def _ending(self, token: int, length: int) -> Ending | None:
        if token in self._end_ids:
            return Ending(FinishReason.STOP, token if token in self._params.stop_ids else None)
        return Ending(FinishReason.LENGTH) if length >= self._max_new_tokens else None

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)

    def _worth_continuing(self) -> bool:
        """Whether a beam may still beat the worst hypothesis, by the rule of `early_stopping`."""
        if len(self.finished) < self.width:
            return True
        early, best = self._params.early_stopping, self.beams[0]
        if early is True:
            return False
        longest = early == "never" and self._params.length_penalty > 0.0
        length = self._max_new_tokens if longest else best.length
        return self._score(best.total, length) > self.finished[-1].score


class BeamGroup(RequestGroup):
    """Maps the beams of a search to the requests that carry them."""

    def __init__(self, members: Sequence[Request]) -> None:
        self.members = tuple(members)
        self.leader = self.members[0]
        self.search = BeamSearch(self.leader.params, self.leader.eos_ids, self.leader.max_new_tokens)
        assert len(self.members) == self.search.width
        self.carriers = [self.leader]  # the request of each beam of the search
        self._found: dict[str, Candidates] = {}  # The keys are request ids; kept until all beams have some.
        for member in self.members:
            member.group = self
        self.leader.num_slots = self.search.width

    @property
    def num_candidates(self) -> int:
        return self.search.num_candidates

    @property
    def _joined(self) -> bool:
        """Whether each beam holds its own slot; before that, the leader holds the slots of all."""
        return self.leader.num_slots == 1

    def blocks_to_join(self, block_size: int) -> int:
        if self._joined:
            return 0
        shared = self.leader.num_prompt // block_size
        return (self.search.width - 1) * (-(-self.leader.num_known // block_size) - shared)

    def add_candidates(self, beam: Request, candidates: Candidates, state: SchedulerState, now: float) -> None:
        """Record the candidates of one beam; after the last beam, advance the search."""
        self._found[beam.id] = candidates
        if not self._joined and len(self.carriers) > 1:
            self._join_leader(state, now)
        if len(self._found) < len(self.carriers):
            return
        complete = [self._found[carrier.id] for carrier in self.carriers]
        self._found.clear()
        parents = self.search.advance(complete)
        if not self.search.over:
            self._assign([self.carriers[parent] for parent in parents], state, now)

    def _assign(self, parents: Sequence[Request], state: SchedulerState, now: float) -> None:
        """Assign a request to each beam of the search; beam i continues `parents[i]`."""
        spare = [member for member in self.members if member not in parents]
        for pruned in spare:
            state.kv.release(pruned)
        self.carriers = []
        for parent in parents:
            carrier = parent
            if parent in self.carriers:
                carrier = spare.pop(0)
                carrier.continue_from(parent)
                state.kv.fork(parent, carrier, parent.num_computed)
            self.carriers.append(carrier)
        for carrier, beam in zip(self.carriers, self.search.beams, strict=True):
            carrier.append(beam.token)
            state.ordering.appended(carrier)
        self._admit_all(state, now)

    def _join_leader(self, state: SchedulerState, now: float) -> None:
        """Fork the prefix that each beam shares with the leader, which has recomputed its tokens after a preemption."""
        for carrier in self.carriers:
            if carrier is not self.leader:
                pairs = zip(self.leader.tokens, carrier.tokens, strict=True)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                # The next block has tokens that only the leader has.
                state.kv.fork(self.leader, carrier, common - common % state.kv.block_size)
        self._admit_all(state, now)

    def _admit_all(self, state: SchedulerState, now: float) -> None:
        self.leader.num_slots = 1
        for carrier in self.carriers:
            if carrier.status is not Status.RUNNING:
                state.join(carrier, now)

    def publish(
        self, state: SchedulerState, now: float, on_token: Callable[[Request, int], object] | None = None
    ) -> None:
        """Give each request the tokens of a hypothesis, best first, when the search is over; `on_token` is called with
        each token, as for other requests."""
        for request, hypothesis in zip(self.members, self.search.finished, strict=True):
            request.clear_output()
            for beam in hypothesis.beam.path():
                request.append(beam.token)
                state.events.append(TokenProduced(now, request.id, beam.token, beam.scored))
                if on_token is not None:
                    on_token(request, beam.token)
            request.ending = hypothesis.ending
            state.events.append(
                RequestFinished(now, request.id, hypothesis.ending, hypothesis.beam.total, hypothesis.score)
            )

    def regroup(self) -> None:
        self._found.clear()
        self.leader.num_slots = self.search.width


def beam_group(request: Request) -> BeamGroup:
    """The group of a request that carries a beam."""
    assert isinstance(request.group, BeamGroup)
    return request.group
