"""The engine fits its cost model to measured steps, reports predictions, and follows the configured targets."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.core.budgets.base import FixedBudget, KneeBudget, TokenBudget
from chairlift.core.budgets.latency import LatencyBudget
from chairlift.core.cost_model import StepShape
from chairlift.core.events import BudgetDecided, StepDone
from chairlift.core.executor import Executor, FinishedStep
from chairlift.core.plan import StepPlan, StepResult, StepTiming
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidParameter
from chairlift.llm import LLM
from chairlift.text.tokenizer import Tokenizer
from tests.core.driving import make_scheduler, run_plan
from tests.core.timed import cpu_like
from tests.text import backends
from tests.tiny import write_tiny_checkpoint


class TimedExecutor(Executor):
    """An executor with a virtual clock, on which steps take the time that `cpu_like` predicts."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def launch(self, plan: StepPlan) -> FinishedStep:
        seconds = cpu_like(StepShape.of(plan))
        self.now += seconds
        result = run_plan(plan, lambda request: 5)
        return FinishedStep(StepResult(plan, result.tokens, result.logprobs, StepTiming(forward=seconds)))


def test_every_step_is_observed_and_reports_its_predicted_duration() -> None:
    executor = TimedExecutor()
    scheduler = make_scheduler(num_blocks=400, max_batch_tokens=64)
    tokenizer = Tokenizer(backends.byte_level())
    engine = Engine(scheduler, executor, tokenizer, vocab_size=400, max_model_len=400, clock=executor.clock)
    steps: list[StepDone] = []
    decisions = 0
    for prompt in (30, 90, 200):
        engine.submit([7] * prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        while engine.has_work:
            events = engine.step()
            steps += [event for event in events if isinstance(event, StepDone)]
            decisions += sum(isinstance(event, BudgetDecided) for event in events)
    assert steps[0].predicted_seconds is None
    assert decisions == 1
    assert engine.cost_model.num_observed == len(steps)
    for step in steps[-30:]:
        assert step.predicted_seconds == pytest.approx(step.seconds, rel=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, FixedBudget), ({"budget": "knee"}, KneeBudget), ({"target_tpot_ms": 0.05}, LatencyBudget)],
)
def test_budgets_change_the_steps_and_not_the_tokens(
    folder: str, options: dict[str, str | float], kind: type[TokenBudget]
) -> None:
    llm = LLM(folder, device="cpu", kv_memory="1MiB", progress=False, **options)
    assert type(llm.engine.scheduler.budget) is kind
    prompts = [{"prompt_token_ids": [3 + i, *range(10, 10 + 25 * i)]} for i in range(1, 6)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    reference = LLM(folder, device="cpu", kv_memory="1MiB", progress=False)
    expected = reference.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.parametrize("options", [{"budget": "endless"}, {"budget": "latency"}, {"target_tpot_ms": -1.0}])
def test_the_configuration_is_checked_before_anything_is_loaded(options: dict[str, str | float]) -> None:
    with pytest.raises(InvalidParameter, match=f"{next(iter(options))}: "):
        EngineConfig(**options)  # type: ignore[arg-type]
