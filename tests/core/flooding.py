"""A tenant that floods the engine, on a virtual clock, and guests with occasional requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from math import ceil

from chairlift.core.budgets.fixed import FixedBudget
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.events import TokenProduced
from chairlift.core.integrity import check_accounting
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.orderings.base import make_ordering
from chairlift.core.plan import StepPlan
from chairlift.core.policies.base import make_policy
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.tenant_isolation import make_tenant_isolation
from tests.core.driving import make_request, run_plan

STEP_PROMPTS = 128  # prompt tokens of a step, at most
GUESTS = 60
OFTEN = 256  # prompt tokens up to which guests come as often as they can; for more, they take their time


@dataclass(frozen=True)
class Machine:
    """What a step costs: a fixed part for reading the weights, and one for each token."""

    step: float
    token: float
    slots: int
    every: float  # seconds between two guests, which arrive anywhere within a step
    flood: float  # requests of the crowd in a second

    def seconds(self, plan: StepPlan) -> float:
        return self.step + self.token * plan.num_tokens

    @property
    def longest_step(self) -> float:
        return self.step + self.token * (STEP_PROMPTS + self.slots)


GPU_LIKE = Machine(0.008, 0.00005, 16, every=0.2979, flood=10.0)
CPU_LIKE = Machine(0.020, 0.0012, 64, every=1.3057, flood=2.5)


@dataclass
class Served:
    first_tokens: list[float]  # of each guest: seconds from its arrival
    crowd_tokens: int = 0  # computed for the crowd since the first guest could have come
    seconds: float = 0.0  # since then

    @property
    def p95(self) -> float:
        return sorted(self.first_tokens)[ceil(0.95 * len(self.first_tokens)) - 1]

    @property
    def worst(self) -> float:
        return max(self.first_tokens)

    @property
    def crowd_rate(self) -> float:
        return self.crowd_tokens / self.seconds


def serve(
    machine: Machine,
    prompt: int,
    *,
    flooded: bool = True,
    guests: int = GUESTS,
    first_guest: float = 1.0,
    order: str = "fair",
    blocks: int = 4000,
) -> Served:
    """Until the last guest has its first token; without guests for as long as they would take. A crowd has sent 200
    long requests before the first guest, and goes on sending more than the machine can serve."""
    every = machine.every * max(1.0, prompt / OFTEN)
    ends = first_guest + (guests or GUESTS) * every
    ordering, cost = make_ordering(order), CostModel()
    scheduler = Scheduler(
        KVCache(blocks, 16, prefix_caching=False),
        FixedBudget.of(STEP_PROMPTS + machine.slots, STEP_PROMPTS),
        make_policy("continuous"),
        machine.slots,
        ordering=ordering,
        tenant_isolation=make_tenant_isolation(ordering, cost, STEP_PROMPTS),
    )
    arrivals = [(first_guest + every * i, f"guest {i}") for i in range(guests)]
    if flooded:
        arrivals += [(max(0, i - 200) / machine.flood, f"{i}") for i in range(200 + int(machine.flood * ends))]
    coming = deque(sorted(arrivals))
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    served, now = Served([]), 0.0
    while len(first) < guests or (not guests and now < ends):
        while coming and coming[0][0] <= now:
            time, name = coming.popleft()
            if name.startswith("guest"):
                came[name] = time
                scheduler.submit(make_request(name, prompt, 20, tenant="guest", arrival=time), time)
            else:
                scheduler.submit(make_request(name, 300, 200, tenant="crowd", arrival=time), time)
        plan = scheduler.schedule(now)
        if not plan:
            now = coming[0][0]
            continue
        seconds = machine.seconds(plan)
        now += seconds
        cost.observe(StepShape.of(plan), seconds)
        scheduler.apply(run_plan(plan), now)
        if now >= first_guest:
            served.seconds += seconds
            served.crowd_tokens += sum(chunk.count for chunk in plan.chunks if chunk.request.tenant == "crowd")
        for event in scheduler.drain_events():
            if isinstance(event, TokenProduced) and event.request_id in came:
                first.setdefault(event.request_id, event.time - came[event.request_id])
    check_accounting(scheduler)
    served.first_tokens = list(first.values())
    return served


@cache
def crowd_alone(machine: Machine) -> float:
    """Tokens per second that are computed for a crowd as long as there are no guests."""
    return serve(machine, 1, guests=0).crowd_rate
