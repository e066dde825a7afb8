"""Requests that do nothing but decode, kept out of the scheduler's way.

Of a hundred requests on board, ninety-nine usually get their one token in a step, as in the step before, and there is
nothing to decide about them: not before one ends or memory runs out. A simulation that asks the scheduler about each
of them in every step spends all its time there. So they are set aside: the scheduler only knows how many they are
(`Lift.aside`), and their tokens are added when someone looks.

Nor is there anything to decide about newcomers when all of them fit into the coming step with their whole prompts:
they board, and at its end they are set aside like the others, without the scheduler having seen more of them than
their arrival (`all_fit`).

What they have computed meanwhile may need blocks that they have not taken yet. Therefore they are set aside only as
long as there are empty blocks for all of that and for everybody else (`leaves_room`). Then no decision depends on
which of them has taken how many.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush
from itertools import islice

from chairlift.core.budget import StepLimits
from chairlift.core.events import TokenProduced
from chairlift.core.prefix import Miss, PrefixMatch
from chairlift.core.request import Ending, FinishReason, Request, Status
from chairlift.core.scheduler import Scheduler

ANY_TOKEN = 2**32 - 1  # what is generated does not matter, only how much; and no prompt has it

_NOTHING_SHARED = PrefixMatch((), Miss.DISABLED)
_ALL_GENERATED = Ending(FinishReason.LENGTH)
_LONGEST_LINE = 256  # of a longer queue, it is not worth while to find out who may board


class Aside:
    """Those of a scheduler's requests on board that are kept here for now."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.context = 0  # known tokens of all of them: what a decode of each would read
        self._steps = 0  # that any of them have taken since the beginning
        self._since: dict[str, int] = {}  # by id: how many of those there were when it was set aside
        self._ends: list[tuple[int, int, Request]] = []  # (its last step, order, request): a heap
        self._owed = 0  # tokens computed by all of them for which they have not taken blocks yet

    def __len__(self) -> int:
        return len(self._since)

    @property
    def steps_to_next_end(self) -> int:
        """The first of them ends with so many steps."""
        return self._ends[0][0] - self._steps

    def take(self) -> None:
        """Set aside all who decode."""
        lift = self.scheduler.lift
        if not lift.running:
            return
        staying = []
        for request in lift.running:
            if request.decoding and not request.steps_in_flight:
                self._add(request)
            else:
                staying.append(request)
        lift.running = staying
        lift.aside = len(self._since)

    def _add(self, request: Request) -> None:
        self._since[request.id] = self._steps
        self.context += request.num_known
        last = self._steps + request.max_new_tokens - request.num_output
        heappush(self._ends, (last, request.order, request))

    def advance(self, count: int, now: float) -> None:
        """One more token for each, `count` times, and the end of those who then have all of theirs."""
        self._steps += count
        self.context += count * len(self._since)
        self._owed += count * len(self._since)
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, request = heappop(self._ends)
            if self.scheduler.kv.prefix_caching:  # others may find what it leaves behind
                self._return(request)
            else:
                missed = self._forget(request)
                self.context -= request.num_known + missed
                self.scheduler.lift.running.append(request)
            self.scheduler.finish(request.id, _ALL_GENERATED, now)
        self.scheduler.lift.aside = len(self._since)

    def give_back(self) -> None:
        """The scheduler is to decide about all of them again."""
        for _, _, request in self._ends:
            self._return(request)
        self._ends.clear()
        self.scheduler.lift.aside = 0

    def _return(self, request: Request) -> None:
        """Back to the scheduler, with all the blocks and tokens it should have by now."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        missed = self._forget(request)
        if not kv.table(request):
            computed = request.num_computed
            kv.attach(request, _NOTHING_SHARED)
            request.start_from(computed)
        copies = kv.reserve(request, missed)
        assert copies is not None, "nobody is set aside unless there are blocks"
        request.extend([ANY_TOKEN] * missed)
        request.start_from(request.num_computed + missed)
        kv.commit(request)
        scheduler.ordering.grew(request)
        self.context -= request.num_known
        insort(scheduler.lift.running, request, key=lambda other: other.order)

    def _forget(self, request: Request) -> int:
        """How many steps it has taken part in, which are not owed any more."""
        missed = self._steps - self._since.pop(request.id)
        self._owed -= missed if self.scheduler.kv.table(request) else missed + request.num_prompt
        return missed

    # ---- newcomers ----------------------------------------------------------------------------------------------

    def all_fit(self, limits: StepLimits) -> bool:
        """Whether everyone in line surely gets a seat, and computes the whole prompt, in a step with these limits."""
        scheduler, kv, line = self.scheduler, self.scheduler.kv, self.scheduler.waiting
        size = len(self._since)
        if not line or scheduler.running or kv.prefix_caching or size + len(line) > scheduler.max_batch_requests:
            return False
        tokens, room = 0, min(limits.prefill_tokens, limits.tokens - size)
        for request in line:
            tokens += request.num_prompt
            if tokens > room or request.generation:
                return False  # too much for one step; or it was on board before, and has more than a prompt
        return self.spare_blocks - 2 * size >= tokens // kv.block_size + 3 * len(line)

    def board_all(self) -> list[Request]:
        """Everyone in line takes a seat, to compute the whole prompt in the coming step."""
        newcomers = list(self.scheduler.waiting)
        for request in newcomers:
            self.scheduler.waiting.remove(request)
            request.status = Status.RUNNING
        return newcomers

    def welcome(self, newcomers: list[Request], now: float) -> None:
        """That step is over: each has its first token, and decodes from now on."""
        lift = self.scheduler.lift
        for request in newcomers:
            request.append(ANY_TOKEN)
            request.start_from(request.num_prompt)
            lift.events.append(TokenProduced(now, request.id, ANY_TOKEN, None))
            if request.max_new_tokens > 1:
                self._owed += request.num_prompt
                self._add(request)
            else:
                lift.running.append(request)
                self.scheduler.finish(request.id, _ALL_GENERATED, now)
        lift.aside = len(self._since)

    # ---- memory -------------------------------------------------------------------------------------------------

    def steps_with_room(self) -> int:
        """So many steps surely find empty blocks for all of them."""
        size = len(self._since)
        return max(0, self.spare_blocks * self.scheduler.kv.block_size // size) if size else 0

    def leaves_room(self) -> bool:
        """Whether everyone who may want memory in the next step finds it, without a cached block being dropped."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        seats = scheduler.max_batch_requests - len(scheduler.running) - len(self._since)
        line = scheduler.waiting
        if seats > 0 and len(line) > _LONGEST_LINE:
            return False
        boarding = islice(line, seats if not kv.prefix_caching else None)
        needed = sum(kv.blocks_for(request.num_expected) + 2 for request in boarding) if seats > 0 else 0
        needed += sum(kv.num_missing(request) + 2 for request in scheduler.running)
        return self.spare_blocks - 2 * len(self._since) >= needed

    @property
    def spare_blocks(self) -> int:
        """Empty blocks, less those that the tokens owed will take at most."""
        kv = self.scheduler.kv
        return kv.pool.num_empty - self._owed // kv.block_size - len(self._since)
