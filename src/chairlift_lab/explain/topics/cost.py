"""The cost model: how long a step will take, and the chunk of prompt that is chosen by it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high
from typing import Any

from chairlift.core.budgets.base import BatchLoad, StepForecast, TokenBudget, chunk_sizes
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.plan import LimitReason, StepLimits
from chairlift.engine.engine import Engine
from chairlift_lab.explain.drawing import HIDDEN, INK, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import CPU_TIME, Run, TimedRequest, TopicEngines, record

MOST = 128  # prompt tokens of a step
ROOM = 28  # prompt tokens that the target leaves room for, about


@dataclass(frozen=True, slots=True)
class Decision:
    """What the budget thought before one step."""

    step: int
    decodes: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]  # predicted, for each size
    chosen: int
    reason: str
    target: float | None


@dataclass(frozen=True, slots=True)
class CostData:
    target: float  # seconds per output token
    coefficients: dict[str, float]
    measured: tuple[float, ...]  # seconds of each step
    predicted: tuple[float | None, ...]
    prefill: tuple[int, ...]  # prompt tokens of each step
    decode: tuple[int, ...]
    decisions: tuple[Decision, ...]
    learning: Run
    run: Run


class _WatchedBudget(TokenBudget):
    """A budget that notes what it decides, and what it expects of the sizes that it did not choose."""

    def __init__(self, inner: TokenBudget, cost: CostModel) -> None:
        super().__init__(inner.most, cost)
        self.inner = inner
        self.calls = 0
        self.decisions: list[Decision] = []

    def limits(self, load: BatchLoad) -> StepLimits:
        limits = self.inner.limits(load)
        if load.decoding and (load.prefilling or load.waiting):
            forecast = StepForecast(self._cost, load)
            sizes = tuple(chunk_sizes(MOST))
            decision = Decision(
                step=self.calls,
                decodes=forecast.decodes,
                sizes=sizes,
                seconds=tuple(map(forecast.seconds, sizes)),
                chosen=limits.prefill_tokens,
                reason=str(limits.reason),
                target=limits.target_seconds,
            )
            self.decisions.append(decision)
        self.calls += 1
        return limits


def run(engines: TopicEngines) -> CostData:
    requests = _requests(engines)

    def start(**options: Any) -> Engine:
        limits = {"max_prefill_tokens": MOST, "max_batch_tokens": 160, "max_batch_requests": 8}
        return engines.start(clock=CPU_TIME, prefix_caching=False, **limits, **options).engine

    first = start()
    learning = record(first, requests)
    target = first.cost_model.predict(StepShape(4, ROOM, 4 * 40, ROOM * 40, 5))
    engine = start(target_tpot_ms=1e3 * target)
    engine.scheduler.budget = budget = _WatchedBudget(engine.scheduler.budget, engine.cost_model)
    played = record(engine, requests)
    done = played.done()
    return CostData(
        target=target,
        coefficients=dict(engine.cost_model.coefficients),
        measured=tuple(step.seconds for step in done),
        predicted=tuple(step.predicted_seconds for step in done),
        prefill=tuple(step.prefill_tokens for step in done),
        decode=tuple(step.decode_tokens for step in done),
        decisions=tuple(budget.decisions),
        learning=learning,
        run=played,
    )


def _requests(engines: TopicEngines) -> list[TimedRequest]:
    """Some that are being answered all the time, and long prompts between."""
    return [
        *(TimedRequest(f"S{index}", engines.prompt(8, skip=5 * index), 40, turn=index) for index in range(4)),
        *(TimedRequest(f"L{index}", engines.prompt(110, skip=index), 4, turn=6 + 9 * index) for index in range(4)),
    ]


def shown(data: CostData) -> Decision:
    """The decision that is drawn: with the most decodes and the latest, if one, of those that the target decided."""
    by_target = [decision for decision in data.decisions if decision.reason == LimitReason.TPOT]
    return max(by_target or data.decisions, key=lambda decision: (decision.decodes, decision.step))


def draw(data: CostData) -> Sheet:
    sheet = Sheet("The cost model, and the chunk that it chose", size=(11.5, 7.6))
    grid = sheet.grid(2, 2, height_ratios=[1, 1])
    _draw_choice(sheet.panel("choice", grid[0, 0]), data)
    _draw_predictions(sheet.panel("predictions", grid[0, 1]), data)
    _draw_steps(sheet.panel("steps", grid[1, :]), data)
    sheet.legend({"decode": "tokens of answers", "prefill": "tokens of prompts (the chunk)"})
    return sheet


def _draw_choice(panel: Panel, data: CostData) -> None:
    choice = shown(data)
    panel.title(f"before step {choice.step + 1}: how long would it take?")
    axes = panel.axes
    axes.plot(choice.sizes, [1e3 * value for value in choice.seconds], color=look_of("prefill").fill, linewidth=2)
    axes.axhline(1e3 * data.target, color=look_of("recomputed").fill, linestyle="--", linewidth=1.2)
    panel.text(
        choice.sizes[-1], 1e3 * data.target, f"target {1e3 * data.target:.0f} ms", ha="right", va="bottom", size=8.5
    )
    height = 1e3 * choice.seconds[choice.sizes.index(choice.chosen)]
    axes.plot([choice.chosen], [height], "o", color=look_of("decode").fill, markersize=9)
    axes.annotate(
        f"chosen: {choice.chosen}",
        (choice.chosen, height),
        xytext=(14, -16),
        textcoords="offset points",
        color=INK,
        fontsize=9,
    )
    panel.chart(f"prompt tokens beside {choice.decodes} decodes", "predicted milliseconds")
    axes.set_ylim(bottom=0)
    panel.drawn["size"] += len(choice.sizes)


def _draw_predictions(panel: Panel, data: CostData) -> None:
    panel.title("every step: predicted and measured")
    pairs = [(1e3 * p, 1e3 * m) for p, m in zip(data.predicted, data.measured, strict=True) if p is not None]
    panel.drawn["point"] += len(pairs)
    most = max(map(max, pairs))
    panel.axes.plot([0, most], [0, most], color=HIDDEN, linewidth=1)
    panel.axes.plot(*zip(*pairs, strict=True), "o", markersize=4.5, alpha=0.75, color=look_of("cached").fill)
    panel.chart("predicted milliseconds", "measured milliseconds")
    panel.axes.set_xlim(0, 1.05 * most)
    panel.axes.set_ylim(0, 1.05 * most)


def _draw_steps(panel: Panel, data: CostData) -> None:
    panel.title("the tokens of every step")
    for step, (decode, prefill) in enumerate(zip(data.decode, data.prefill, strict=True)):
        panel.column(step + 1, {"decode": decode, "prefill": prefill}, width=0.8)
    panel.chart("step", "tokens")
    panel.axes.set_xlim(0.3, len(data.decode) + 0.7)


def figures(data: CostData) -> dict[str, Any]:
    choice = shown(data)
    ms = {name: 1e3 * value for name, value in data.coefficients.items()}
    # The typical error once the model has seen some steps.
    pairs = list(zip(data.predicted, data.measured, strict=True))[10:]
    errors = [abs(measured / predicted - 1) for predicted, measured in pairs if predicted]
    error = median_high(errors) if errors else 0.0
    return {"ms": ms, "error": error, "choice": choice, "target": 1e3 * data.target}


TOPIC = Topic("cost", run, {"cost": draw}, figures)
