"""The token budget of a step: decodes first, then prompts in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift_lab.explain.palette import Theme
from chairlift_lab.explain.recording import Run, TimedRequest
from chairlift_lab.explain.sheet import Sheet
from chairlift_lab.explain.topic import Picture, Topic
from chairlift_lab.explain.topic_engines import TopicEngines

BUDGET = 16
# Prompt tokens, new tokens, and the turn at which each request comes.
REQUESTS = ((5, 15, 0), (7, 13, 0), (30, 6, 2), (22, 8, 3), (9, 7, 6), (24, 5, 7), (10, 4, 9))


@dataclass(frozen=True, slots=True)
class BudgetData:
    budget: int
    run: Run


def run(engines: TopicEngines) -> BudgetData:
    requests = [
        TimedRequest(chr(ord("A") + index), engines.prompt(prompt, skip=4 * index), new, turn)
        for index, (prompt, new, turn) in enumerate(REQUESTS)
    ]
    return BudgetData(
        BUDGET, engines.record(requests, max_batch_tokens=BUDGET, max_batch_requests=8, prefix_caching=False)
    )


def draw(data: BudgetData, theme: Theme) -> Sheet:
    sheet = Sheet(theme, f"Every step has room for {data.budget} tokens: decodes first, then prompts", size=(11, 6))
    panel = sheet.panel("steps", sheet.grid(1, 1)[0, 0])
    for step in data.run.steps:
        height = 0
        for chunk in step.chunks:
            kind = "decode" if chunk.decode else "prefill"
            for _ in range(chunk.count):
                panel.cell(step.turn, data.budget - height - 1, kind, chunk.request)
                height += 1
        for empty in range(height, data.budget):
            panel.cell(step.turn, data.budget - empty - 1, "empty")
    panel.grid_only(data.run.turns, data.budget, equal=False)
    panel.axes.set_yticks([data.budget - count + 0.5 for count in (1, 4, 8, 12, 16)], ["1", "4", "8", "12", "16"])
    panel.axes.set_ylabel("tokens of the step", color=theme.muted)
    panel.axes.set_xlabel("step", color=theme.muted)
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


def chunks_of(data: BudgetData, name: str) -> list[int]:
    """The sizes of the pieces in which a prompt was read."""
    chunks = (chunk for step in data.run.steps for chunk in step.chunks if chunk.request == name)
    return [chunk.count for chunk in chunks if not chunk.decode]


def says(data: BudgetData) -> str:
    tokens = [sum(chunk.count for chunk in step.chunks) for step in data.run.steps]
    return f"The tokens of {len(tokens)} steps, at most {data.budget} each; {full_steps(data)} steps are full."


def teach(data: BudgetData) -> str:
    longest = max(data.run.requests, key=lambda request: len(request.prompt))
    pieces = chunks_of(data, longest.name)
    return f"""
Every running request waits for the whole step. A step that reads a prompt of thousands of tokens would hold up all the
others, so a step has a **token budget**: here {data.budget} tokens (`--max-batch-tokens {data.budget}`).

[[budget]]

Each column is one step, each square one token, with the letter of its request. The engine fills a column like this:

1. **Decodes first** (orange, at the bottom). Every request in the middle of an answer gets one token, so new
   requests never hold up running ones.
2. **Then prompts** (blue), as many of their tokens as still fit. A prompt that does not fit is read in **chunks**, over
   several steps: the prompt of {longest.name} has {len(longest.prompt)} tokens and was read as
   {" + ".join(map(str, pieces))}.
3. **What is left stays empty.** {full_steps(data)} of the {len(data.run.steps)} steps are full to the last token.

Prefill and decode are not two kinds of work for this engine. A request has tokens that are known and tokens that are
computed; a decode is simply one token behind, a prompt is many behind, and both go through the model together.
"""


TOPIC = Topic(
    name="budget",
    title="The token budget",
    question="Which tokens are computed in a step when not all of them fit?",
    run=run,
    pictures=(Picture("budget", draw, says),),
    teach=teach,
    code=(
        "chairlift/core/scheduler/packing.py",
        "chairlift/core/budgets/base.py",
        "chairlift/core/scheduler/scheduler.py",
    ),
)
