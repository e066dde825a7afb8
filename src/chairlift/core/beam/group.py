"""The requests of one beam search and the blocks they share.

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

from collections.abc import Callable, Sequence
from itertools import takewhile

from chairlift.core.beam.search import BeamSearch, Candidates
from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.request import Request, RequestGroup, Status
from chairlift.core.scheduler.state import SchedulerState


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
        found = [self._found[carrier.id] for carrier in self.carriers]
        self._found.clear()
        parents = self.search.advance(found)
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
                common = _num_common(self.leader, carrier)
                whole_blocks = (
                    common - common % state.kv.block_size
                )  # the next block has tokens that only the leader has
                state.kv.fork(self.leader, carrier, whole_blocks)
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
        for request, found in zip(self.members, self.search.finished, strict=True):
            request.clear_output()
            for beam in found.beam.path():
                request.append(beam.token)
                state.events.append(TokenProduced(now, request.id, beam.token, beam.scored))
                if on_token is not None:
                    on_token(request, beam.token)
            request.ending = found.ending
            state.events.append(RequestFinished(now, request.id, found.ending, found.beam.total, found.score))

    def regroup(self) -> None:
        self._found.clear()
        self.leader.num_slots = self.search.width


def beam_group(request: Request) -> BeamGroup:
    """The group of a request that carries a beam."""
    assert isinstance(request.group, BeamGroup)
    return request.group


def _num_common(one: Request, other: Request) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=True)))
