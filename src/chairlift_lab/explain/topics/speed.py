"""How long a step takes, and what can be made of it: the cost model, and draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from chairlift.core.budgets.base import BatchLoad, StepForecast, TokenBudget, chunk_sizes
from chairlift.core.cost_model import CostModel, StepShape
from chairlift.core.plan import LimitReason, StepLimits
from chairlift.engine.engine import Engine
from chairlift_lab.explain.drawing import HIDDEN, INK, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import CPU_TIME, TEXTS, Run, TimedRequest, TopicEngines, record

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

    @property
    def shown(self) -> Decision:
        """The decision that is drawn: of those that the target decided, if any, the latest with the most decodes."""
        by_target = [decision for decision in self.decisions if decision.reason == LimitReason.TPOT]
        return max(by_target or self.decisions, key=lambda decision: (decision.decodes, decision.step))


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
            seconds, reason = tuple(map(forecast.seconds, sizes)), str(limits.reason)
            chosen, target = limits.prefill_tokens, limits.target_seconds
            self.decisions.append(Decision(self.calls, forecast.decodes, sizes, seconds, chosen, reason, target))
        self.calls += 1
        return limits


class Cost(Topic):
    """The cost model: how long a step will take, and the chunk of prompt that is chosen by it."""

    def run(self, engines: TopicEngines) -> CostData:
        # Some requests are being answered all the time, with long prompts between.
        requests = [
            *(TimedRequest(f"S{index}", engines.prompt(8, skip=5 * index), 40, turn=index) for index in range(4)),
            *(TimedRequest(f"L{index}", engines.prompt(110, skip=index), 4, turn=6 + 9 * index) for index in range(4)),
        ]

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

    def draw(self, data: CostData) -> Sheet:
        sheet = Sheet("cost")
        grid = sheet.grid(2, 2, height_ratios=[1, 1])
        _draw_choice(sheet.panel("choice", grid[0, 0]), data.shown, data.target)
        _draw_predictions(sheet.panel("predictions", grid[0, 1]), data)
        steps = sheet.panel("steps", grid[1, :])
        steps.title("the tokens of every step")
        for step, (decode, prefill) in enumerate(zip(data.decode, data.prefill, strict=True)):
            steps.column(step + 1, {"decode": decode, "prefill": prefill}, width=0.8)
        steps.chart("step", "tokens")
        steps.axes.set_xlim(0.3, len(data.decode) + 0.7)
        return sheet

    def figures(self, data: CostData) -> dict[str, Any]:
        ms = {name: 1e3 * value for name, value in data.coefficients.items()}
        # The typical error once the model has seen some steps.
        pairs = list(zip(data.predicted, data.measured, strict=True))[10:]
        errors = [abs(measured / predicted - 1) for predicted, measured in pairs if predicted]
        error = median_high(errors) if errors else 0.0
        return {"ms": ms, "error": error, "choice": data.shown, "target": 1e3 * data.target}


def _draw_choice(panel: Panel, choice: Decision, target: float) -> None:
    panel.title(f"before step {choice.step + 1}: how long would it take?")
    axes, limit = panel.axes, 1e3 * target
    axes.plot(choice.sizes, [1e3 * value for value in choice.seconds], color=look_of("prefill").fill, linewidth=2)
    axes.axhline(limit, color=look_of("recomputed").fill, linestyle="--", linewidth=1.2)
    panel.text(choice.sizes[-1], limit, f"target {limit:.0f} ms", ha="right", va="bottom", size=8.5)
    point = choice.chosen, 1e3 * choice.seconds[choice.sizes.index(choice.chosen)]
    axes.plot(*([value] for value in point), "o", color=look_of("decode").fill, markersize=9)
    where = {"xytext": (14, -16), "textcoords": "offset points"}
    axes.annotate(f"chosen: {choice.chosen}", point, color=INK, fontsize=9, **where)
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


# ---- draft tokens ---------------------------------------------------------------------------------------------------

DRAFTS = 4
# A text that comes again, and code that follows a pattern; and how many tokens of each are made.
DRAFTED: dict[str, tuple[str, int]] = TEXTS["drafted"]


@dataclass(frozen=True, slots=True)
class Row:
    """One step of a request: its draft tokens, how many were accepted, and the token that the model added."""

    drafts: tuple[str, ...]
    accepted: int
    own: str


@dataclass(frozen=True, slots=True)
class SpeculationData:
    rows: dict[str, tuple[Row, ...]]
    most: int  # draft tokens per step
    same_output: bool
    run: Run
    plain: Run  # the same requests without draft tokens

    def plain_steps(self, name: str) -> int:
        return sum(name in step.sampled for step in self.plain.steps)

    def steps(self) -> dict[str, str]:
        return {name: f"{len(rows)} steps instead of {self.plain_steps(name)}" for name, rows in self.rows.items()}


class Speculation(Topic):
    """Speculative decoding: draft tokens, verified in one step."""

    def run(self, engines: TopicEngines, texts: Mapping[str, tuple[str, int]] = DRAFTED) -> SpeculationData:
        encode = engines.loaded.tokenizer.encode
        requests = [
            TimedRequest(name, tuple(encode(text, add_special_tokens=False)), new)
            for name, (text, new) in texts.items()
        ]
        drafted = engines.record(requests, speculate="ngram", draft_length=DRAFTS, prefix_caching=False)
        plain = engines.record(requests, prefix_caching=False)
        rows: dict[str, tuple[Row, ...]] = dict.fromkeys(texts, ())
        for step in drafted.steps:
            for chunk in step.chunks:
                if chunk.samples:
                    *right, own = step.sampled[chunk.request]
                    row = Row(tuple(engines.labels(chunk.drafts)), len(right), engines.labels([own])[0])
                    rows[chunk.request] += (row,)
        same = all(drafted.output(name)[:new] == plain.output(name)[:new] for name, (_, new) in texts.items())
        return SpeculationData(rows, DRAFTS, same, drafted, plain)

    def draw(self, data: SpeculationData) -> Sheet:
        longest = max(map(len, data.rows.values()))
        sheet = Sheet("speculation", least_height=1.9 + 0.34 * longest)
        grid = sheet.grid(1, len(data.rows))
        for column, (name, steps) in enumerate(data.steps().items()):
            panel = sheet.panel(name, grid[0, column])
            panel.title(name, steps)
            _draw_rows(panel, data.rows[name], data.most, longest)
        return sheet

    def figures(self, data: SpeculationData) -> dict[str, Any]:
        every_row = [row for rows in data.rows.values() for row in rows]
        return {
            "accepted": sum(row.accepted for row in every_row),
            "proposed": sum(len(row.drafts) for row in every_row),
            "summary": "; ".join(f"{name}: {count}" for name, count in data.steps().items()),
            "steps": " and ".join(f"{name} took {count}" for name, count in data.steps().items()),
            "same": "exactly the same" if data.same_output else "not the same, which must not be",
        }


def _draw_rows(panel: Panel, rows: tuple[Row, ...], most: int, longest: int) -> None:
    own_at = 2 * most + 0.4
    for y, row in enumerate(rows):
        for index, draft in enumerate(row.drafts):
            kind, sign = ("accepted", "✓") if index < row.accepted else ("rejected", "✗")
            panel.cell(index * 2, y, kind, f"{sign} {draft}", width=2, size=8.5)
        panel.cell(own_at, y, "decode", row.own, width=2, size=8.5)
        panel.text(own_at + 2.7, y + 0.5, f"+{row.accepted + 1}", size=9)
    panel.grid_only(own_at + 3.2, longest, equal=False)
    panel.row_names([f"step {index + 1}" for index in range(len(rows))])
    places = [2 * index + 1 for index in range(most)] + [own_at + 1, own_at + 2.7]
    names = [f"draft {index + 1}" for index in range(most)] + ["model", "tokens"]
    panel.names_above(places, names, fontsize=8.5, color=INK)
