"""How many drafts: many where they are cheap and right, none where they cost more than they bring."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from chairlift.core.cost_model import FEATURES, CostModel, StepShape
from chairlift.core.events import DraftsVerified
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.speculation import ngram
from chairlift.speculation.control.controller import SpeculationController, Wanted
from chairlift.speculation.control.draft_length import FIRST_GUESS, AdaptiveLength
from chairlift.speculation.control.payoff import DraftPayoff, Pace, _Batch
from chairlift.speculation.ngram import NgramProposer
from tests.core.driving import make_request, make_scheduler, run_plan
from tests.speculation.guessing import Guesser


def cost_model(step: float, token: float) -> CostModel:
    """One that has seen enough of steps that take `step` seconds and `token` for each token."""
    cost = CostModel(dict.fromkeys(FEATURES, 0.0) | {"step": step, "token": token})
    cost.num_observed = 1000
    return cost


@dataclass
class Decoding:
    """A batch of requests that decode, and how often their drafts are right."""

    length: AdaptiveLength
    size: int
    seconds: Callable[[int], float]  # of a step of so many tokens
    right: Callable[[int, int], int]  # of (request, drafts): how many

    def steps(self, count: int) -> list[int]:
        """Drafts per request of each step."""
        requests = [make_request(f"r{i}", 10, 100) for i in range(self.size)]
        for request in requests:
            request.append(1)
        chunks = [Chunk(request, 10, 1, (), samples=True) for request in requests]
        history = []
        for _ in range(count):
            lengths: Sequence[int] = [0] * self.size
            if self.length.allows_drafts(self.size):
                lengths = self.length.choose([(request, 0) for request in requests], chunks, NgramProposer())
            accepted = [self.right(i, length) for i, length in enumerate(lengths)]
            for request, length, right in zip(requests, lengths, accepted, strict=True):
                if length:
                    self.length.learn(request.id, length, right)
            seconds = self.seconds(self.size + sum(lengths))
            self.length.payoff.observe(self.size, any(lengths), sum(accepted), seconds, num_drafts=sum(lengths))
            history.append(sum(lengths))
        return history


def test_drafts_that_are_always_right_and_cost_nothing_are_all_taken() -> None:
    length = AdaptiveLength(cost_model(step=0.02, token=0.0001))
    history = Decoding(length, 1, lambda tokens: 0.02 + 0.0001 * tokens, lambda _, drafts: drafts).steps(60)
    assert max(history) == NgramProposer.max_length
    assert sum(history) > NgramProposer.max_length * 45
    assert length.payoff.speedup > 4


def test_drafts_that_are_never_right_are_given_up_but_tried_again() -> None:
    length = AdaptiveLength(cost_model(step=0.02, token=0.005))
    history = Decoding(length, 1, lambda tokens: 0.02 + 0.005 * tokens, lambda _, drafts: 0).steps(400)
    assert 0 < sum(history[100:]) < 20


def test_a_large_batch_gets_none() -> None:
    """Where arithmetic is the limit, a draft costs as much as a token, and is worth one only if it is right."""
    length = AdaptiveLength(cost_model(step=0.001, token=0.001))
    history = Decoding(length, 64, lambda tokens: 0.001 + 0.001 * tokens, lambda _, drafts: drafts).steps(100)
    assert sum(history) == 0
    assert length.payoff._batch(64).pause > 400


def test_that_none_would_pay_is_tried_after_a_pause() -> None:
    """For once: what is known of their cost may be wrong."""
    length = AdaptiveLength(cost_model(step=0.001, token=0.001))
    decoding = Decoding(length, 64, lambda tokens: 0.001 + 0.001 * tokens, lambda _, drafts: drafts)
    before_pause, pause = 6 + 6, 512
    assert sum(decoding.steps(before_pause + pause)) == 0
    assert decoding.steps(10) == [2 * 64] + [0] * 9


def test_each_request_gets_as_many_as_its_own_history_says() -> None:
    length = AdaptiveLength(cost_model(step=0.02, token=0.002))
    good_and_bad = Decoding(
        length, 2, lambda tokens: 0.02 + 0.002 * tokens, lambda index, drafts: drafts if index == 0 else 0
    )
    good_and_bad.steps(60)
    assert length.chance("r0", 0) > 0.9
    assert length.chance("r1", 0) < 0.4


def test_what_the_cost_model_does_not_know_the_clock_tells() -> None:
    """The model promises cheap drafts; in truth a step with drafts takes three times as long."""
    length = AdaptiveLength(cost_model(step=0.02, token=0.0001))
    slow = Decoding(length, 1, lambda tokens: 0.02 if tokens == 1 else 0.06, lambda _, drafts: min(drafts, 1))
    history = slow.steps(1000)
    assert sum(1 for drafts in history if drafts) < 60
    seconds = sum(slow.seconds(1 + drafts) for drafts in history)
    tokens = sum(1 + min(drafts, 1) for drafts in history)
    assert seconds / tokens < 0.02 / 0.97


def test_what_drafts_add_to_a_step_is_learned_from_steps_that_differ_in_them() -> None:
    """A draft takes four times as long as the model says of a token, and then hardly one pays."""
    chance = random.Random(1)
    length = AdaptiveLength(cost_model(step=0.02, token=0.0003))

    def right(_: int, drafts: int) -> int:
        return next((place for place in range(drafts) if chance.random() > 0.8), drafts)

    def seconds(tokens: int) -> float:
        return 0.02 + 0.0003 * 16 + 0.0012 * (tokens - 16)

    history = Decoding(length, 16, seconds, right).steps(600)
    assert max(history) > 3 * 16, "as the model would have it"
    slope = length.payoff.slope(16).value
    assert slope is not None
    assert 0.0004 < slope < 0.0013, "forgiven a little by every step without drafts"
    drafted = [drafts for drafts in history if drafts]
    assert len(drafted) < 100
    assert sum(drafted[-20:]) < 20 * 3 * 16


def test_a_pause_ends_when_drafts_begin_to_pay() -> None:
    payoff = DraftPayoff()

    def steps(count: int, with_drafts: float) -> int:
        used = 0
        for _ in range(count):
            drafts = 4 if payoff.allows_drafts(1) else 0
            payoff.observe(1, drafts > 0, drafts // 2, with_drafts if drafts else 1.0)
            used += bool(drafts)
        return used

    assert steps(500, with_drafts=9.0) < 60
    assert steps(5000, with_drafts=1.1) > 2000


class SlowAndCut(Guesser):
    """All of its guesses take a second, and a grammar leaves none of them."""

    spent = 1.0

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        return [0] * len(requests)

    def _guess(self, one: Wanted) -> list[int]:
        return []


def test_drafts_that_a_grammar_cuts_are_neither_wrong_nor_free() -> None:
    length = AdaptiveLength(cost_model(step=0.02, token=0.0001))
    proposer = SlowAndCut(lambda request, length: [])
    speculation = SpeculationController(proposer, length)
    scheduler = make_scheduler(speculation=speculation)
    scheduler.submit(make_request("a", 10, 90), 0.0)
    ran = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        result = run_plan(plan)
        scheduler.apply(result, 0.0)
        assert not plan.num_drafts
        proposed = speculation._proposing.first_chunk is plan.chunks[0]
        ran.append(speculation.observe(result, 0.25 + proposed * proposer.spent))
    assert set(ran) == {0.25}, "what the cost model is told is what running the steps took"
    assert not [event for event in scheduler.drain_events() if isinstance(event, DraftsVerified)]
    assert length.chance("a", 0) == FIRST_GUESS
    batch = length.payoff._batches[1]
    assert batch.plain.value == 0.25
    assert batch.pause, "and they are given up because they cost more than they bring"


class Forgetful(Guesser):
    """Always right. But like a network it has to compute all tokens of a request first, at most 256 in a step."""

    def __init__(self) -> None:
        super().__init__(lambda request, length: [])
        self.computed: dict[str, int] = {}

    def foresee(self, requests: Sequence[Request]) -> list[int | None]:
        return [0] * len(requests)

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts: list[list[int]] = []
        room, self.catching_up, self.spent = 256, 0.0, 0.0
        for one in wanted:
            missed = one.request.num_known - self.computed.get(one.request.id, 0)
            count = min(missed, room)
            room -= count
            self.computed[one.request.id] = one.request.num_known - missed + count
            self.catching_up += 0.01 * count * (missed > 8)  # a whole step's time for each hundred
            drafts.append([7] * one.length if count == missed else [])
            self.spent += 0.01 * len(drafts[-1])
        self.spent += self.catching_up
        return drafts


def test_drafts_are_not_judged_by_steps_that_only_catch_up_with_a_long_pause() -> None:
    """Two requests missed 2,048 tokens each: for eight steps not even one of them can have drafts again."""
    length, proposer = AdaptiveLength(cost_model(step=1.0, token=0.001)), Forgetful()
    speculation = SpeculationController(proposer, length)
    scheduler = make_scheduler(num_blocks=2000, max_batch_tokens=2000, speculation=speculation)
    length.payoff._batches[2] = batch = _Batch(plain=Pace(1.0, 2.0, 99), pause=2048, next_pause=128)
    for name in "ab":
        scheduler.submit(make_request(name, 10, 2600), 0.0)
    drafts, paused = [], 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        result = run_plan(plan, lambda request: 7)
        scheduler.apply(result, 0.0)
        proposed = speculation._proposing.first_chunk is plan.chunks[0]
        speculation.observe(result, 1.0 + 0.001 * plan.num_tokens + proposed * proposer.spent)
        drafts.append(plan.num_drafts)
        paused += batch.pause > 0
    assert paused == 2047, "the one pause that there was"
    caught_up = next(place for place, count in enumerate(drafts) if count)
    assert caught_up == 2048 + 8, "after the pause, that began with the prompts, and eight steps of catching up"
    assert sum(drafts[caught_up + 20 :]) > 7 * len(drafts[caught_up + 20 :])
    assert batch.drafted.value < 0.25, "none of the catching up counts"
    assert batch.plain.value < 0.51


@pytest.mark.parametrize("seed", range(4))
def test_bad_luck_for_a_few_steps_is_no_reason_to_pause(seed: int) -> None:
    """Two guesses of which each is right in two cases of five, in a step that takes a sixth longer for them."""
    payoff, chance = DraftPayoff(), random.Random(seed)
    used = 0
    for _ in range(1000):
        drafts = 2 if payoff.allows_drafts(1) else 0
        accepted = next((place for place in range(drafts) if chance.random() > 0.42), drafts)
        payoff.observe(1, drafts > 0, accepted, 1.16 if drafts else 1.0)
        used += bool(drafts)
    assert used > 700


def test_one_request_whose_drafts_lose_a_little_is_tried_less_and_less() -> None:
    """Though it takes many steps to tell that they do."""
    payoff, chance = DraftPayoff(), random.Random(0)
    used = 0
    for _ in range(20_000):
        drafts = payoff.allows_drafts(1)
        payoff.observe(1, drafts, 0, chance.uniform(0.95, 1.05) * (1.1 if drafts else 1.0))
        used += drafts
    assert used < 0.06 * 20_000


def test_a_machine_that_slows_down_is_no_reason_to_pause() -> None:
    """Steps without drafts are seldom measured while drafts pay, and so were measured on the faster machine."""
    payoff, used = DraftPayoff(), []
    for step in range(400):
        drafts, pace = payoff.allows_drafts(4), 1.0 if step < 180 else 1.4
        payoff.observe(4, drafts, 3 * drafts, pace * (1.5 if drafts else 1.0))
        used.append(drafts)
    assert sum(used[180:]) > 200
    assert not payoff._batches[3].pause


def test_ngrams_find_what_followed_last_time() -> None:
    request = make_request("a", [1, 2, 3, 4, 5, 6, 9, 3, 4], 20)
    proposer = NgramProposer()
    assert proposer.foresee([request]) == [2]
    assert list(proposer.propose([Wanted(request, 3, ())])[0]) == [5, 6, 9]
    request.extend([5, 6])
    assert proposer.foresee([request]) == [4]
    assert proposer.foresee([request]) == [4], "a question, which changes nothing"
    assert list(proposer.propose([Wanted(request, 2, ())])[0]) == [9, 3]
    request.append(7)
    assert proposer.foresee([request]) == [None]
    request.extend([8, 5])
    assert proposer.foresee([request]) == [1]
    assert list(proposer.propose([Wanted(request, 2, ())])[0]) == [6, 7], "the latest 5"
    proposer.forget("a")
    assert not proposer._indices


def test_a_place_that_was_right_is_followed_for_as_long_as_it_is() -> None:
    """Both copies of 3 4 5 6 are found, the later one first. The text goes on like the earlier one, which is followed
    from there on, although its last four tokens stand at a later place as well."""
    first, second = [30, 31, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 8], [20, 3, 4, 5, 6, 9]
    request = make_request("a", [*first, *second, 1, 2], 30)
    proposer = NgramProposer()
    kinds = []
    for token in [3, 4, 5, 6, 7, 8, 3, 4, 5, 6]:
        kinds += proposer.foresee([request])
        assert list(proposer.propose([Wanted(request, 1, ())])[0]) == [token]
        request.append(token)
    assert kinds == [2, 2, 4, 4, 4, 4, 8, 8, 8, 8]
    assert proposer.foresee([request]) == [8]
    assert list(proposer.propose([Wanted(request, 1, ())])[0]) == [8], "not the 9 that came last"
    request.append(9)
    assert proposer.foresee([request]) == [4]
    assert list(proposer.propose([Wanted(request, 3, ())])[0]) == [1, 2, 3], "what followed 4 5 6 9"


def test_nothing_is_indexed_in_a_pause_and_long_texts_are_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_AT_ONCE", 100)
    proposer, length = NgramProposer(), AdaptiveLength(cost_model(step=0.02, token=0.0001))
    scheduler = make_scheduler(max_batch_tokens=2000, speculation=SpeculationController(proposer, length))
    length.payoff._batches[1] = batch = _Batch(plain=Pace(0.02, 1.0, 99), pause=5)
    scheduler.submit(make_request("a", [1, 2, 3, 4, 5] * 50, 60), 0.0)
    drafts, indexed = [], []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        drafts.append(plan.num_drafts)
        indexed.append(proposer._indices["a"].num_indexed if proposer._indices else 0)
        result = run_plan(plan)
        scheduler.apply(result, 0.0)
    assert batch.pause == 0
    assert indexed[:9] == [0] * 5 + [104, 204, 257, 258], "after a pause of five steps, that of the prompt among them"
    assert not any(drafts[:7])


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_text_that_repeats_itself_is_guessed_to_go_on_so(period: int) -> None:
    tokens = [i % period for i in range(12)]
    request = make_request("a", tokens, 10)
    proposer = NgramProposer()
    assert proposer.foresee([request]) == [4]
    assert list(proposer.propose([Wanted(request, 7, ())])[0]) == [i % period for i in range(12, 19)]


def test_an_index_that_grows_by_steps_is_the_index_of_the_whole() -> None:
    tokens = [(7 * i * i + 3 * i) % 11 for i in range(200)]
    grown, whole = NgramProposer(), NgramProposer()
    request = make_request("a", tokens[:2], 10)
    for end, step in enumerate([1, 1, 1, 3, 1, 7, 2, 4, 1, 5] * 6):
        request.extend(tokens[request.num_known : request.num_known + step])
        fresh = make_request(f"b{end}", request.tokens, 10)
        grown.foresee([request])
        whole.foresee([fresh])
        for name in ("num_indexed", "_behind_long", "_behind_short", "_behind_one"):
            assert getattr(grown._indices["a"], name) == getattr(whole._indices[fresh.id], name)


def test_steps_with_drafts_are_decodes_to_the_cost_model() -> None:
    request = make_request("a", 10, 20)
    request.append(5)
    chunk = Chunk(request, 10, 4, (), samples=True, drafts=(1, 2, 3))
    assert StepShape.of(StepPlan(0, (chunk,))) == StepShape(decode_tokens=4, decode_kv=14, requests=1)
