"""The requests of one beam search, and the blocks they share.

A search of width w is w requests. The first of them, the *leader*, is the only one that waits in the queue; it boards
for all, so it takes w seats, and computes the prompt. From then on each request carries one beam and is computed like
any other, in the same ragged batch. What is different is what happens to the sampled tokens: a beam hands in its
*candidates* and waits until all have done so. Then the search says which beams go on:

    beams     a  b  c  d       c has two continuations, d none: the request of d gives back its blocks,
                   /|\\         takes a fork of c's block table, and carries c's other continuation.
              a  b c  d        Whoever writes into a shared block first gets a copy of it.

A preempted search loses the seats and blocks of all its beams at once, but keeps their tokens. When there is room for
all of them, the leader computes its tokens again, and the others join it with what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from chairlift.core.beam.search import BeamSearch, Candidates
from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.request import Request, Status
from chairlift.core.scheduler.state import SchedulerState


class BeamGroup:
    def __init__(self, members: Sequence[Request]) -> None:
        self.members = tuple(members)
        self.leader = self.members[0]
        self.search = BeamSearch(self.leader.params, self.leader.eos_ids, self.leader.max_new_tokens)
        assert len(self.members) == self.search.width
        self.carriers = [self.leader]  # who carries which beam of the search
        self._found: dict[str, Candidates] = {}  # by request id: of those that wait for the others
        for member in self.members:
            member.group = self
        self.leader.num_slots = self.search.width

    def blocks_to_join(self, kv: KVCache) -> int:
        """Blocks that the others will need beside those of the leader, for the tokens they know."""
        if self.leader.num_slots == 1:
            return 0  # they have joined
        shared = self.leader.num_prompt // kv.block_size
        return (self.search.width - 1) * (kv.blocks_for(self.leader.num_known) - shared)

    def take(self, beam: Request, candidates: Candidates, state: SchedulerState, now: float) -> None:
        """All known tokens of `beam` are computed, and these may come next. With the last of them, all go on."""
        self._found[beam.id] = candidates
        if self.leader.num_slots > 1 and len(self.carriers) > 1:
            self._join_leader(state, now)
        if len(self._found) < len(self.carriers):
            return
        found = [self._found[carrier.id] for carrier in self.carriers]
        self._found.clear()
        parents = self.search.advance(found)
        if not self.search.over:
            self._hand_on([self.carriers[parent] for parent in parents], state, now)

    def _hand_on(self, parents: Sequence[Request], state: SchedulerState, now: float) -> None:
        """Each beam of the search continues one of `parents`; find a request to carry it."""
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
        self._seat_all(state, now)

    def _join_leader(self, state: SchedulerState, now: float) -> None:
        """After a preemption, the leader has computed its tokens again: what the others share with it is there."""
        for carrier in self.carriers:
            if carrier is not self.leader:
                common = _num_common(self.leader, carrier)
                whole_blocks = common - common % state.kv.block_size  # the next one holds the leader's tokens already
                state.kv.fork(self.leader, carrier, whole_blocks)
        self._seat_all(state, now)

    def _seat_all(self, state: SchedulerState, now: float) -> None:
        self.leader.num_slots = 1
        for carrier in self.carriers:
            if carrier.status is not Status.RUNNING:
                state.join(carrier, now)

    def tell(self, state: SchedulerState, now: float, hear: Callable[[Request, int], object] | None = None) -> None:
        """The search is over: only now is it known which tokens its requests stand for, the first one for the best.
        `hear` is called with each of them, as it is with every token that a request without beams gets."""
        for request, found in zip(self.members, self.search.finished, strict=True):
            request.take_back_output()
            for beam in found.beam.path():
                request.append(beam.token)
                state.events.append(TokenProduced(now, request.id, beam.token, beam.scored))
                if hear is not None:
                    hear(request, beam.token)
            request.ending = found.ending
            state.events.append(RequestFinished(now, request.id, found.ending, found.beam.total, found.score))

    def gather(self) -> None:
        """All have lost their seats: from now on, the leader stands for them again."""
        self._found.clear()
        self.leader.num_slots = self.search.width


def _num_common(one: Request, other: Request) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=True)))
