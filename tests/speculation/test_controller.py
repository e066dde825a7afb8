"""How many draft tokens: many where they are cheap and right, none where they cost more than they save."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from chairlift.core.cost_model import StepShape
from chairlift.core.events import DraftsVerified
from chairlift.core.plan import BlockCopy, Chunk, PlanBuilder, StepLimits, StepPlan, StepResult
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.core.targets import Targets
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.payoff import Pace, SpeculationTuning
from chairlift.speculation.proposers.base import LEVELS, Draft, DraftTerms, Proposer
from tests.core.driving import deterministic_token, make_request, make_scheduler, run_plan, run_to_end, step
from tests.speculation.drafting import FixedProposer, continue_deterministically, fixed_length

TUNING = SpeculationTuning()


@dataclass
class Luck(Proposer):
    """Draft tokens of `deterministic_token`, each right with a probability; drafting takes `seconds` per token."""

    chance: float = 1.0
    seconds: float = 0.0
    level: int = LEVELS - 1
    name: str = "luck"
    max_length: int = 7
    extra_work: Callable[[], bool] = lambda: False
    now: float = 0.0
    drafted: list[int] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        terms.did_extra_work = self.extra_work()
        drafts: list[Draft | None] = []
        for request in requests:
            further = Request(request.id, request.tokens, request.params, max_new_tokens=99, arrival=0.0)
            tokens: list[int] = []
            for _ in range(terms.length(request)):
                token = deterministic_token(further)
                tokens.append(token if self._random.random() < self.chance else -7)
                further.append(token)
            drafts.append(Draft(tokens, [self.level] * len(tokens)))
            self.drafted.append(len(tokens))
        self.now += self.seconds * max(self.drafted[-len(requests) :])
        return drafts

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        self.observed.append((proposed, accepted))


def decode(
    proposer: Luck,
    seconds: Callable[[int], float],
    size: int = 1,
    tokens: int = 300,
) -> tuple[SpeculationController, list[StepPlan], float]:
    """Decode on a virtual clock, where `seconds(tokens)` is the time of a step. Returns the plans that only
    decode, and the seconds of all steps."""
    speculation = SpeculationController(proposer, clock=proposer.clock)
    scheduler = make_scheduler(num_blocks=4000, max_batch_tokens=2000, max_batch_requests=size, speculation=speculation)
    for index in range(size):
        scheduler.submit(make_request(f"r{index}", 10, tokens), 0.0)
    plans = []
    while scheduler.has_work:
        begun = proposer.now
        plan = scheduler.schedule(proposer.now)
        result = run_plan(plan)
        proposer.now += seconds(plan.num_tokens)
        scheduler.apply(result, proposer.now)
        took = proposer.now - begun
        running = speculation.observe(result, took)
        assert running == pytest.approx(seconds(plan.num_tokens)), "the time of drafting is no part of the step's"
        if all(chunk.decodes for chunk in plan.chunks):
            plans.append(plan)
    return speculation, plans, proposer.now


def test_drafts_that_are_always_right_and_cost_nothing_are_all_verified() -> None:
    _, plans, _ = decode(Luck(), lambda tokens: 0.02 + 0.0001 * tokens)
    assert max(plan.num_drafts for plan in plans) == 7
    assert len(plans) < 300 / 6


def test_drafts_that_are_never_right_are_given_up() -> None:
    proposer = Luck(chance=0.0)
    _, plans, seconds = decode(proposer, lambda tokens: 0.02 + 0.005 * tokens, tokens=1000)
    assert sum(plan.num_drafts > 0 for plan in plans) < 100
    assert seconds < 1.05 * 1000 * 0.025


def test_a_large_batch_gets_none() -> None:
    """Where arithmetic is the limit, a draft token costs as much as a token, and cannot save any time."""
    _, plans, _ = decode(Luck(), lambda tokens: 0.001 + 0.001 * tokens, size=64, tokens=40)
    assert sum(plan.num_drafts > 0 for plan in plans) <= 2 * TUNING.enough_steps, "but for a trial"


def test_the_least_chance_is_the_cost_of_a_draft_token_in_tokens() -> None:
    """A token takes 20 ms without drafts; a draft token takes 1 ms to verify, and 0, 4 or 100 ms to draft."""
    found = []
    for seconds in (0.0, 0.004, 0.1):
        speculation = SpeculationController(Luck())
        assert speculation._least_chances(1, 1) is None, "nothing is measured yet"
        batch = speculation.payoff.batch(1)
        batch.plain = Pace(0.02, 1.0, 9)
        assert speculation._least_chances(1, 1) == (0.5, 0.5), "a trial"
        batch.in_trial, batch.slope.value = False, 0.001
        speculation._pass_seconds[1] = seconds
        found.append(speculation._least_chances(1, 1))
        assert batch.pause == (TUNING.first_pause if seconds == 0.1 else 0)
    assert found == [pytest.approx((0.05, 0.05)), pytest.approx((0.05, 0.25)), None]


def _decode(name: str) -> Chunk:
    request = make_request(name, 10, 50)
    request.append(1)
    request.start_from(10)
    return Chunk(request, 10, 1, [0], samples=True)


def test_drafts_that_make_steps_too_slow_are_given_up() -> None:
    """A step with drafts takes three times as long as one without, however many there are."""
    proposer = Luck(chance=0.3)
    _, plans, seconds = decode(proposer, lambda tokens: 0.02 if tokens == 1 else 0.06, tokens=1000)
    assert sum(plan.num_drafts > 0 for plan in plans) < 80
    assert seconds < 1.1 * 1000 * 0.02


def test_what_a_draft_token_adds_to_a_step_is_measured() -> None:
    speculation, _, _ = decode(Luck(chance=0.8), lambda tokens: 0.02 + 0.0006 * tokens, size=16, tokens=100)
    assert speculation.payoff.batch(16).slope.value == pytest.approx(0.0006, rel=0.05)


def test_accepted_and_rejected_draft_tokens_are_counted() -> None:
    proposer = Luck(chance=0.7)
    speculation, plans, _ = decode(proposer, lambda tokens: 0.02, tokens=1200)
    verified = [plan.num_drafts for plan in plans if plan.num_drafts]
    assert [proposed for proposed, _ in proposer.observed] == verified
    assert sum(accepted for _, accepted in proposer.observed) == 1200 - 1 - len(plans)
    judged = sum(min(proposed, accepted + 1) for proposed, accepted in proposer.observed)
    share = sum(accepted for _, accepted in proposer.observed) / judged
    assert share == pytest.approx(0.7, abs=0.04)
    assert speculation.calibration[True].chances[9] == pytest.approx(0.95), "these requests sample"
    assert speculation.calibration[False].chances[9] == pytest.approx(0.7, abs=0.12)


def test_drafts_end_one_token_before_the_last_that_a_request_may_get() -> None:
    plans = run_to_end(make_scheduler(speculation=fixed_length(FixedProposer(lambda _, length: [998] * length), 5)))
    assert not plans
    scheduler = make_scheduler(speculation=fixed_length(FixedProposer(lambda _, length: [998] * length), 5))
    scheduler.submit(make_request("a", 10, 4), 0.0)
    assert [plan.num_drafts for plan in run_to_end(scheduler)] == [0, 2, 1, 0]


def test_without_room_for_all_each_request_gets_a_share() -> None:
    speculation = fixed_length(FixedProposer(lambda _, length: [998] * length), 5, max_drafts=7)
    scheduler = make_scheduler(speculation=speculation)
    for name in "abc":
        scheduler.submit(make_request(name, 4, 20), 0.0)
    plans = run_to_end(scheduler)
    assert [len(chunk.drafts) for chunk in plans[1].chunks] == [2, 2, 2]
    assert max(plan.num_drafts for plan in plans) <= 7


def test_with_less_room_than_requests_no_more_are_drafted_than_there_is_room_for() -> None:
    speculation = fixed_length(FixedProposer(lambda _, length: [998] * length), 5, max_drafts=2)
    scheduler = make_scheduler(speculation=speculation)
    for name in "abc":
        scheduler.submit(make_request(name, 4, 20), 0.0)
    plans = run_to_end(scheduler)
    assert [len(chunk.drafts) for chunk in plans[1].chunks] == [1, 1, 0]
    assert max(plan.num_drafts for plan in plans) == 2


@pytest.mark.parametrize("copies", [(), (BlockCopy(0, 1),)])
def test_a_request_whose_blocks_are_copied_in_the_step_gets_no_drafts(copies: tuple[BlockCopy, ...]) -> None:
    """A proposer would read the target of the copy before it is made."""
    scheduler = make_scheduler()
    request = make_request("a", 10, 20)
    scheduler.submit(request, 0.0)
    scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
    scheduler.kv.reserve(request, 1)
    builder = PlanBuilder(StepLimits.most(64))
    builder.add_decode(request, scheduler.kv.table(request), copies)
    fixed_length(FixedProposer(lambda _, length: [998] * length), 5).add_drafts(scheduler.state, builder)
    assert len(builder.chunks["a"].drafts) == (0 if copies else 5)


def test_output_that_is_recomputed_token_by_token_gets_drafts_only_behind_its_last_token() -> None:
    speculation = fixed_length(FixedProposer(continue_deterministically, 5), 3)
    scheduler = make_scheduler(max_prefill_tokens=1, prefix_caching=False, speculation=speculation)
    request = make_request("a", 2, 12)
    scheduler.submit(request, 0.0)
    while request.num_output < 6:
        step(scheduler)
    scheduler.abandon(scheduler.schedule(0.0), 0.0)
    plans = run_to_end(scheduler)
    known = [chunk for plan in plans for chunk in plan.chunks if not chunk.samples]
    assert len(known) >= 7
    assert not any(chunk.drafts for chunk in known)
    assert any(plan.num_drafts for plan in plans)
    alone = make_scheduler()
    expected = make_request("a", 2, 12)
    alone.submit(expected, 0.0)
    run_to_end(alone)
    assert request.output == expected.output


def test_steps_of_extra_work_are_compared_with_nothing() -> None:
    """A draft model that catches up with a pause takes long, but only once."""
    proposer = Luck(seconds=0.5, extra_work=lambda: True)
    speculation, plans, _ = decode(proposer, lambda tokens: 1.0, tokens=100)
    assert any(plan.num_drafts for plan in plans)
    assert speculation.payoff.batch(1).drafted.count == 0
    assert not speculation._pass_seconds


def test_draft_tokens_that_a_grammar_forbids_are_neither_verified_nor_counted_as_wrong() -> None:
    proposer = FixedProposer(lambda _, length: [998] * length)
    speculation = fixed_length(proposer, 5, num_allowed=lambda request, tokens: 2)
    scheduler = make_scheduler(speculation=speculation)
    structured = SamplingParams(max_tokens=9, structure=Structure.regex("a*"))
    scheduler.submit(make_request("a", 10, 9, params=structured), 0.0)
    scheduler.make_ready("a")
    scheduler.submit(make_request("b", 10, 9), 0.0)
    plans = run_to_end(scheduler)
    assert [len(chunk.drafts) for chunk in plans[1].chunks] == [2, 5]
    verified = [event for event in scheduler.drain_events() if isinstance(event, DraftsVerified)]
    assert {event.proposed for event in verified if event.request_id == "a"} <= {0, 1, 2}


@dataclass
class Waiting(Proposer):
    """Expects drafts of one level, or none, for requests whose last token is not read yet."""

    level: int | None
    name: str = "waiting"
    max_length: int = 7

    def expected_level(self, request: Request) -> int | None:
        return self.level

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[Draft | None]:
        raise AssertionError("the last token is not known yet")


@pytest.mark.parametrize(("level", "expected"), [(None, False), (0, False), (9, True)])
def test_the_next_token_is_waited_for_if_a_likely_draft_is_expected(level: int | None, expected: bool) -> None:
    speculation = SpeculationController(Waiting(level))
    scheduler = make_scheduler(speculation=speculation)
    scheduler.submit(make_request("a", 10, 30), 0.0)
    scheduler.apply(run_plan(scheduler.schedule(0.0)), 0.0)
    scheduler.schedule(0.0)  # in flight while the next one is planned
    speculation.payoff.batch(1).plain = Pace(1.0, 1.0, 99)
    assert scheduler.schedule(0.0).num_drafts == 0
    assert speculation.drafting == expected


def test_steps_that_waited_for_drafts_count_as_steps_with_drafts() -> None:
    speculation = SpeculationController(Luck())
    result = StepResult(StepPlan(0, (_decode("a"),)), [5], [None])
    for _ in range(8):
        speculation.observe(result, 1.0)
    assert speculation.payoff.allows_drafts(1)
    for _ in range(20):
        speculation.observe(result, 1.2, waited=True)
        speculation.observe(result, 1.0)
    assert not speculation.payoff.allows_drafts(1)


def test_steps_that_are_not_typical_are_compared_with_nothing() -> None:
    speculation = SpeculationController(Luck())
    result = StepResult(StepPlan(0, (_decode("a"),)), [5], [None])
    for _ in range(8):
        speculation.observe(result, 1.0, typical=False)
    assert not speculation.payoff.batch(1).plain.count


def test_steps_with_drafts_are_decodes_to_the_cost_model() -> None:
    request = make_request("a", 10, 20)
    request.append(5)
    chunk = Chunk(request, 10, 4, (), samples=True, drafts=(1, 2, 3))
    assert StepShape.of(StepPlan(0, (chunk,))) == StepShape(decode_tokens=4, decode_kv=14, requests=1)


def test_without_room_for_all_requests_get_drafts_in_the_order_in_which_they_are_due() -> None:
    speculation = fixed_length(FixedProposer(lambda _, length: [998] * length), 5, max_drafts=7)
    scheduler = make_scheduler(speculation=speculation, order="edf")
    for name, targets in (("none", Targets()), ("patient", Targets(tpot=9.0)), ("late", Targets(tpot=0.1))):
        scheduler.submit(make_request(name, 4, 20, targets=targets), 0.0)
    plans = run_to_end(scheduler)
    assert {chunk.request.id: len(chunk.drafts) for chunk in plans[1].chunks} == {"late": 5, "patient": 2, "none": 0}
