"""Helpers that run a scheduler with a fake executor, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from chairlift.core.budgets.base import make_budget
from chairlift.core.cost_model import FEATURES, CostModel, WorkForecast
from chairlift.core.events import Event
from chairlift.core.integrity import check_accounting, check_plan, check_shared_prefixes
from chairlift.core.kv.kv_cache import HybridCache, KVCache
from chairlift.core.kv.swap import SwapSpace
from chairlift.core.lengths import OutputLengths
from chairlift.core.orderings.base import make_ordering
from chairlift.core.orderings.fair import FairOrdering
from chairlift.core.plan import Chunk, StepPlan, StepResult
from chairlift.core.policies.base import make_policy
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.tenant_isolation import TenantIsolation
from chairlift.speculation.control.controller import SpeculationController
from chairlift_lab.simulator.step_cost import MeasuredCost

ORDERS = ("fcfs", "priority", "shortest", "boost", "cached", "fair", "fair-cached", "edf", "slack")
NextToken = Callable[[Request], int]

STEP_COST = MeasuredCost(step=4.0, request=0.0, prefill_kv=0.0, decode_kv=0.0, tokens=((0, 1.0),))


def with_states(
    num_blocks: int,
    block_size: int = 16,
    *,
    num_slots: int,
    snapshot_interval: int | None = None,
    prefix_caching: bool = True,
    kv_class: type[HybridCache] = HybridCache,
) -> KVCache:
    """A KV cache for a model with recurrent layers."""
    return kv_class(
        num_blocks,
        block_size,
        num_states=num_slots,
        snapshot_interval=snapshot_interval,
        prefix_caching=prefix_caching,
    )


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_batch_tokens: int = 64,
    max_prefill_tokens: int | None = None,
    max_batch_requests: int = 8,
    prefix_caching: bool = True,
    kv_class: Callable[..., KVCache] = KVCache,
    policy: str = "continuous",
    max_delay: float | None = None,
    order: str = "fcfs",
    weights: Mapping[str, float] | None = None,
    max_overtakes: int | None = None,
    forecast: WorkForecast | None = None,
    swap: SwapSpace | None = None,
    speculation: SpeculationController | None = None,
    heavy: int | None = None,
    takes_slots: bool = False,
    lengths: OutputLengths | None = None,
    budget: str = "fixed",
) -> Scheduler:
    """`budget`: the adaptive ones believe `settled_forecast`, and `latency` has a target of 1.5 seconds; `heavy`: with
    the order fair, tenants with more open requests than this are isolated from the others; `takes_slots`: with the
    order priority, a waiting request may take a running one's slot."""
    takes = True if takes_slots and order == "priority" else None
    ordering, tenant_isolation = make_ordering(order, weights, priority_takes_slots=takes), None
    if heavy is not None and isinstance(ordering, FairOrdering):
        ordering.HEAVY_REQUESTS = heavy
        tenant_isolation = TenantIsolation(ordering, STEP_COST.predict, max_prefill_tokens or max_batch_tokens)
    return Scheduler(
        kv_class(num_blocks, block_size, prefix_caching=prefix_caching),
        make_budget(
            budget,
            settled_forecast().cost,
            max_batch_tokens=max_batch_tokens,
            max_prefill_tokens=max_prefill_tokens,
            target_tpot_ms=1500 if budget == "latency" else None,
        ),
        make_policy(policy, None if max_delay is None else 1000 * max_delay),
        max_batch_requests,
        ordering=ordering,
        max_overtakes=max_overtakes,
        forecast=forecast,
        swap=swap,
        speculation=speculation,
        tenant_isolation=tenant_isolation,
        lengths=lengths,
    )


def settled_forecast(chunk: int = 16) -> WorkForecast:
    """A forecast that knows `STEP_COST` / 10: a prompt token takes a tenth of a second, a step 0.4 more."""
    cost = CostModel(dict.fromkeys(FEATURES, 0.0) | {"token": 0.1, "step": 0.4})
    cost.num_observed = 1000
    return WorkForecast(cost, chunk)


def make_request(request_id: str, prompt: int | Sequence[int], new: int = 4, **options: object) -> Request:
    """Make a request; a prompt given as a length gets tokens that no other request has."""
    if isinstance(prompt, int):
        base = 1000 + 1000 * (hash_name(request_id) % 4_000_000)
        prompt = range(base, base + prompt)
    params = options.pop("params", SamplingParams(max_tokens=new))
    options.setdefault("arrival", 0.0)
    return Request(request_id, list(prompt), params, max_new_tokens=new, **options)  # type: ignore[arg-type]


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode()[-7:], "big")


def deterministic_token(request: Request) -> int:
    """A token that depends only on the request's own tokens, as a greedy model's does."""
    return (31 * request.tokens[-1] + 7 * request.num_known) % 997


def run_plan(plan: StepPlan, next_token: NextToken = deterministic_token) -> StepResult:
    tokens: list[int] = []
    accepted: dict[str, int] = {}
    for chunk in plan.chunks:
        if chunk.drafts:
            accepted[chunk.request.id] = verify(chunk, next_token, tokens)
        elif chunk.samples:
            tokens.append(next_token(chunk.request))
    return StepResult(plan, tokens, [None] * len(tokens), accepted=accepted)


def verify(chunk: Chunk, next_token: NextToken, tokens: list[int]) -> int:
    """Append the tokens of a step with drafts: the accepted drafts and one more; return the number accepted."""
    request = chunk.request
    copy = Request(request.id, request.tokens, request.params, max_new_tokens=99, arrival=0.0)
    for accepted, draft in enumerate((*chunk.drafts, None)):
        tokens.append(next_token(copy))
        if tokens[-1] != draft:
            return accepted
        copy.append(draft)
    raise AssertionError("the last row has no draft")


def step(scheduler: Scheduler, now: float = 0.0, next_token: NextToken = deterministic_token) -> StepPlan:
    """Run one step and check all invariants before and after it."""
    plan = scheduler.schedule(now)
    check_accounting(scheduler)
    check_plan(scheduler, plan)
    scheduler.apply(run_plan(plan, next_token), now)
    check_accounting(scheduler)
    check_shared_prefixes(scheduler)
    return plan


def run_to_end(
    scheduler: Scheduler, next_token: NextToken = deterministic_token, limit: int = 10_000
) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler, float(len(plans)), next_token))
        assert len(plans) < limit, "the workload does not end"
    return plans


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.chunks]


def events_of(scheduler: Scheduler, kind: type) -> list[Event]:
    return [event for event in scheduler.drain_events() if isinstance(event, kind)]


def run_pipelined(
    scheduler: Scheduler, depth: int, limit: int = 10_000, execute: Callable[[StepPlan], None] | None = None
) -> int:
    """Like run_to_end, but with `depth` steps planned before their results are read, as on a GPU; `execute` is called
    with each plan before its result is applied."""
    in_flight: deque[StepPlan] = deque()
    steps = 0
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule(float(steps))
        check_accounting(scheduler)
        if plan:
            check_plan(scheduler, plan)
            in_flight.append(plan)
        if in_flight and (len(in_flight) > depth or not plan):
            done = in_flight.popleft()
            if execute is not None:
                execute(done)
            scheduler.apply(run_plan(done), float(steps))
            check_accounting(scheduler)
            check_shared_prefixes(scheduler)
        steps += 1
        assert steps < limit, "the workload does not end"
    return steps
