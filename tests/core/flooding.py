"""Simulates a heavy tenant that floods the engine and a light one, on a virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from math import ceil

from chairlift.core.budgets.base import FixedBudget
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

STEP_PROMPTS = 128  # the most prompt tokens of a step
LIGHT_REQUESTS = 60
OFTEN = 256  # the interval between light requests grows with prompts longer than this


@dataclass(frozen=True)
class Machine:
    """The cost of a step: a fixed part for reading the weights and a part per token."""

    step: float
    token: float
    slots: int
    every: float  # seconds between two light requests, which arrive at any point of a step
    flood: float  # requests of the heavy tenant per second

    def seconds(self, plan: StepPlan) -> float:
        return self.step + self.token * plan.num_tokens

    @property
    def longest_step(self) -> float:
        return self.step + self.token * (STEP_PROMPTS + self.slots)


GPU_LIKE = Machine(0.008, 0.00005, 16, every=0.2979, flood=10.0)
CPU_LIKE = Machine(0.020, 0.0012, 64, every=1.3057, flood=2.5)


@dataclass
class Served:
    first_tokens: list[float]  # seconds from the arrival of each light request
    heavy_tokens: int = 0  # computed for the heavy tenant since the first light request was due
    seconds: float = 0.0  # duration of that time

    @property
    def p95(self) -> float:
        return sorted(self.first_tokens)[ceil(0.95 * len(self.first_tokens)) - 1]

    @property
    def worst(self) -> float:
        return max(self.first_tokens)

    @property
    def heavy_rate(self) -> float:
        return self.heavy_tokens / self.seconds


def serve(
    machine: Machine,
    prompt: int,
    *,
    flooded: bool = True,
    light_requests: int = LIGHT_REQUESTS,
    first_light: float = 1.0,
    order: str = "fair",
    blocks: int = 4000,
) -> Served:
    """Run until the last light request has its first token, or for the same time without light requests. The heavy
    tenant has sent 200 long requests by then and keeps sending more than the machine can serve."""
    every = machine.every * max(1.0, prompt / OFTEN)
    ends = first_light + (light_requests or LIGHT_REQUESTS) * every
    ordering, cost = make_ordering(order), CostModel()
    scheduler = Scheduler(
        KVCache(blocks, 16, prefix_caching=False),
        FixedBudget.of(STEP_PROMPTS + machine.slots, STEP_PROMPTS),
        make_policy("continuous"),
        machine.slots,
        ordering=ordering,
        tenant_isolation=make_tenant_isolation(ordering, cost.predict, STEP_PROMPTS),
    )
    arrivals = [(first_light + every * i, f"light {i}") for i in range(light_requests)]
    if flooded:
        arrivals += [(max(0, i - 200) / machine.flood, f"{i}") for i in range(200 + int(machine.flood * ends))]
    coming = deque(sorted(arrivals))
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    served, now = Served([]), 0.0
    while len(first) < light_requests or (not light_requests and now < ends):
        while coming and coming[0][0] <= now:
            time, name = coming.popleft()
            if name.startswith("light"):
                arrived[name] = time
                scheduler.submit(make_request(name, prompt, 20, tenant="light", arrival=time), time)
            else:
                scheduler.submit(make_request(name, 300, 200, tenant="heavy", arrival=time), time)
        plan = scheduler.schedule(now)
        if not plan:
            now = coming[0][0]
            continue
        seconds = machine.seconds(plan)
        now += seconds
        cost.observe(StepShape.of(plan), seconds)
        scheduler.apply(run_plan(plan), now)
        if now >= first_light:
            served.seconds += seconds
            served.heavy_tokens += sum(chunk.count for chunk in plan.chunks if chunk.request.tenant == "heavy")
        for event in scheduler.drain_events():
            if isinstance(event, TokenProduced) and event.request_id in arrived:
                first.setdefault(event.request_id, event.time - arrived[event.request_id])
    check_accounting(scheduler)
    served.first_tokens = list(first.values())
    return served


@cache
def heavy_alone(machine: Machine) -> float:
    """Tokens per second computed for the heavy tenant without light requests."""
    return serve(machine, 1, light_requests=0).heavy_rate
