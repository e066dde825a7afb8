"""The token budget of a step: decodes first, then prompts in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.drawing import Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, TopicEngines

BUDGET = 16
# Prompt tokens, new tokens, and the turn at which each request comes.
REQUESTS = ((5, 15, 0), (7, 13, 0), (30, 6, 2), (22, 8, 3), (9, 7, 6), (24, 5, 7), (10, 4, 9))


@dataclass(frozen=True, slots=True)
class BudgetData:
    budget: int
    run: Run


def run(engines: TopicEngines) -> BudgetData:
    requests = engines.requests(REQUESTS, skip=4)
    played = engines.record(requests, max_batch_tokens=BUDGET, max_batch_requests=8, prefix_caching=False)
    return BudgetData(BUDGET, played)


def draw(data: BudgetData) -> Sheet:
    sheet = Sheet(f"Every step has room for {data.budget} tokens: decodes first, then prompts", size=(11, 6))
    panel = sheet.panel("steps")
    for step in data.run.steps:
        tokens = [(chunk.kind, chunk.request) for chunk in step.chunks for _ in range(chunk.count)]
        tokens += [("empty", "")] * (data.budget - len(tokens))
        for height, (kind, request) in enumerate(tokens, start=1):
            panel.cell(step.turn, data.budget - height, kind, request)
    panel.grid_only(data.run.turns, data.budget, equal=False)
    panel.axes.set_yticks([data.budget - count + 0.5 for count in (1, 4, 8, 12, 16)], ["1", "4", "8", "12", "16"])
    panel.axis_names("step", "tokens of the step")
    panel.column_names([str(step + 1) for step in range(data.run.turns)])
    sheet.legend(
        {
            "decode": "decode: the next token of a running request",
            "prefill": "prefill: a token of a prompt",
            "empty": "unused budget",
        }
    )
    return sheet


def full_steps(data: BudgetData) -> int:
    return sum(sum(chunk.count for chunk in step.chunks) == data.budget for step in data.run.steps)


def figures(data: BudgetData) -> dict[str, Any]:
    longest = max(data.run.requests, key=lambda request: len(request.prompt))
    pieces = " + ".join(map(str, data.run.prompt_chunks(longest.name)))
    return {"longest": longest, "pieces": pieces, "full_steps": full_steps(data)}


TOPIC = Topic("budget", run, {"budget": draw}, figures)
