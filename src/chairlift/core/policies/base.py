"""The interface of a policy, which decides when waiting requests may be admitted.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from chairlift.core.choices import make_choice
from chairlift.core.request import Request
from chairlift.core.scheduler.waiting_queue import WaitingQueue, WaitReason
from chairlift.registry import Registry

POLICIES: Registry[type[Policy]] = Registry("policy", "chairlift.core.policies")


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
