"""When requests may board. Who comes first is the ordering's; packing, budgets and allocation are the scheduler's.

continuous   whenever there is a seat                 aaaaaaa
                                                      bbb.cccccc
                                                      ddddddeeee

static,      a batch boards together, and its         aaaaaaa|.....
dynamic      seats are free when its last one ends    bbb····|.....    ····  finished, its row still computed
                                                      dddddd·|.....
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from chairlift.core.request import Request, Status
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason
from chairlift.errors import InvalidParameter

DYNAMIC_DELAY = 0.05
STATIC_DELAY = 10.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may board now, best first, and what everybody else waits for."""

    candidates: Sequence[Request] | Iterator[Request]  # the queue may be long: an iterator looks no further than asked
    reason_of_others: WaitReason | None = None  # None: there are none, all may board


class Policy(Protocol):
    name: str
    keeps_seats: bool  # a request that finishes leaves its seat, and its memory, only when nobody is on board any more

    def admit(self, waiting: WaitingQueue, running: Sequence[Request], seats: int, now: float) -> Admission:
        """Open the door to some, all or none of `waiting`, of whom there is at least one."""
        ...

    @property
    def stays_shut(self) -> bool:
        """With someone on board: whether nobody can board before all who are have ended."""
        ...

    def opens_at(self, waiting: WaitingQueue, seats: int) -> float | None:
        """With nobody on board: when the door opens if nothing else happens; None if it is open."""
        ...


class ContinuousPolicy:
    """Iteration-level scheduling: a seat is taken again in the very next step."""

    name = "continuous"
    keeps_seats = False
    stays_shut = False

    def admit(self, waiting: WaitingQueue, running: Sequence[Request], seats: int, now: float) -> Admission:
        return Admission(waiting.in_boarding_order())

    def opens_at(self, waiting: WaitingQueue, seats: int) -> float | None:
        return None


class BatchPolicy:
    """A batch boards together, and nobody else does until the last of it has ended.

    With nobody on board, a batch of all that wait (at most as many as there are seats) is released when

    - there are enough of them to fill it, or
    - the oldest has waited for `max_delay` seconds, or
    - it is known that no others come (`Scheduler.expect_no_more`), as with a list of prompts.

    So nothing waits for company for ever. If the step's budget does not let all of them on board at once, the rest
    of the batch follows in the next steps; a member that memory sends back boards again as soon as it fits.
    """

    keeps_seats = True

    def __init__(self, name: str, max_delay: float) -> None:
        self.name = name
        self.max_delay = max_delay
        self._batch: list[Request] = []  # all that were released together

    def admit(self, waiting: WaitingQueue, running: Sequence[Request], seats: int, now: float) -> Admission:
        if not running:
            opens_at = self.opens_at(waiting, seats)
            if opens_at is not None and now < opens_at:
                return Admission((), WaitReason.BATCH_FILLING)
            self._batch = list(islice(waiting.in_boarding_order(), seats))
        return Admission(sorted(self._left_behind(), key=waiting.ordering.rank), WaitReason.BATCH_RUNNING)

    def opens_at(self, waiting: WaitingQueue, seats: int) -> float | None:
        full = len(waiting) >= seats
        if full or self._left_behind() or not waiting.waits_for_company:
            return None
        return waiting.oldest.arrival + self.max_delay

    @property
    def stays_shut(self) -> bool:
        return not self._left_behind()

    def _left_behind(self) -> list[Request]:
        """Those of the last batch who have no seat (yet, or any more)."""
        return [request for request in self._batch if request.status is Status.WAITING]


POLICIES = ("continuous", "static", "dynamic")


def make_policy(name: str, max_delay_ms: float | None = None) -> Policy:
    """The policy of that name. `max_delay_ms` is how long a batch waits to be filled: 50 ms if dynamic, and if static
    10 s, which is there only so that nothing hangs."""
    if name not in POLICIES:
        raise InvalidParameter("policy", f"unknown policy {name!r}; choose from {', '.join(POLICIES)}")
    if name == "continuous":
        if max_delay_ms is not None:
            raise InvalidParameter("max_delay_ms", "only goes with the policies static and dynamic, which fill batches")
        return ContinuousPolicy()
    if max_delay_ms is None:
        return BatchPolicy(name, DYNAMIC_DELAY if name == "dynamic" else STATIC_DELAY)
    if not isinstance(max_delay_ms, (int, float)) or not 0 <= max_delay_ms < float("inf"):
        raise InvalidParameter("max_delay_ms", f"must be a number of at least 0, got {max_delay_ms!r}")
    return BatchPolicy(name, max_delay_ms / 1000)
