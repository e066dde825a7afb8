"""The interface of a policy, which decides when waiting requests may be admitted, and the policies of the package.

The ordering decides which request is first; packing, budgets and allocation belong to the scheduler.

continuous   whenever a slot is free                  aaaaaaa
                                                      bbb.cccccc
                                                      ddddddeeee

static,      a batch is admitted together, and its    aaaaaaa|.....
dynamic      slots are free when its last one ends    bbb····|.....    ····  finished, its row still computed
                                                      dddddd·|.....
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from chairlift.core.request import Request, Status
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason
from chairlift.errors import InvalidParameter
from chairlift.registry import Registry, make_choice

POLICIES: Registry[type[Policy]] = Registry("policy", "chairlift.core.policies", grouped=True)


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """The waiting requests that may be admitted now, and why the others wait."""

    candidates: Iterable[Request]  # best first; may be lazy, since the queue may be long
    reason_of_others: WaitReason | None = None  # None: all waiting requests are candidates


class Policy(ABC):
    """Decides in every step which waiting requests may be admitted."""

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # Fields of the config, passed to the constructor as keywords.
    keeps_slots: ClassVar[bool] = False  # finished requests keep slot and memory until no request is running
    always_open: ClassVar[bool] = False  # every waiting request is a candidate in every step

    @abstractmethod
    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        """Select candidates from `waiting`, which is not empty; `slots` is max_batch_requests."""

    @property
    def closed_until_batch_ends(self) -> bool:
        """Whether no request can be admitted before all running ones have finished."""
        return False

    def opens_at(self, waiting: WaitingQueue, slots: int) -> float | None:
        """When `decide` will select candidates if no request is running; None if it would now."""
        return None


def make_policy(name: str, max_delay_ms: float | None = None) -> Policy:
    """Build the policy called `name`."""
    return make_choice(POLICIES, name, {"max_delay_ms": max_delay_ms})


@POLICIES.register("continuous")
class ContinuousPolicy(Policy):
    """Makes every waiting request a candidate in every step."""

    name = "continuous"
    always_open = True

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        return PolicyDecision(waiting.in_admission_order())


class BatchPolicy(Policy):
    """Admits a batch together, and no other request until its last member has finished.

    With no request running, a batch of all waiting requests (at most one per slot) is released when

    - there are enough to fill it, or
    - the oldest has waited for `max_delay_ms`, or
    - no more are expected (`Scheduler.expect_no_more`), as with a list of prompts.

    If the step's budget does not admit the whole batch at once, the rest follows in the next steps; a preempted member
    is admitted again as soon as it fits.
    """

    options = frozenset({"max_delay_ms"})
    keeps_slots = True
    default_delay_ms: ClassVar[float]

    def __init__(self, max_delay_ms: float | None = None) -> None:
        delay = self.default_delay_ms if max_delay_ms is None else max_delay_ms
        if not isinstance(delay, (int, float)) or not 0 <= delay < float("inf"):
            raise InvalidParameter("max_delay_ms", f"must be a number of at least 0, got {max_delay_ms!r}")
        self.max_delay = delay / 1000
        self._batch: list[Request] = []  # the requests released together

    def decide(self, waiting: WaitingQueue, running: Sequence[Request], slots: int, now: float) -> PolicyDecision:
        if not running:
            opens_at = self.opens_at(waiting, slots)
            if opens_at is not None and now < opens_at:
                return PolicyDecision((), WaitReason.BATCH_FILLING)
            self._batch = list(islice(_leaders_first(waiting.in_admission_order()), slots))
        return PolicyDecision(sorted(self._members_waiting(), key=waiting.ordering.rank), WaitReason.BATCH_RUNNING)

    def opens_at(self, waiting: WaitingQueue, slots: int) -> float | None:
        full = len(waiting) >= slots
        if full or self._members_waiting() or not waiting.may_grow:
            return None
        return waiting.oldest.arrival + self.max_delay

    @property
    def closed_until_batch_ends(self) -> bool:
        return not self._members_waiting()

    def _members_waiting(self) -> list[Request]:
        """Members of the last batch that are not admitted yet or were preempted."""
        return [request for request in self._batch if request.status is Status.WAITING]


def _leaders_first(requests: Iterable[Request]) -> Iterator[Request]:
    """A completion without output waits until its leader has computed their prompt, so a waiting leader comes before
    it: a batch of completions whose leader is not in it would never begin."""
    seen = set[int]()
    for request in requests:
        leader = request.leader
        waits = leader is not None and leader.status is Status.WAITING and leader.ready and not request.num_output
        for each in (leader, request) if waits else (request,):
            if each is not None and each.order not in seen:
                seen.add(each.order)
                yield each


@POLICIES.register("static")
class StaticPolicy(BatchPolicy):
    """Waits for a full batch; the default delay of 10 s keeps the last requests from waiting forever."""

    name = "static"
    default_delay_ms = 10_000.0


@POLICIES.register("dynamic")
class DynamicPolicy(BatchPolicy):
    """Waits for a full batch for at most `max_delay_ms`, by default 50 ms."""

    name = "dynamic"
    default_delay_ms = 50.0
