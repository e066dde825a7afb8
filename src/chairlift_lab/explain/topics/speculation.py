"""Speculative decoding: draft tokens, verified in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.drawing import INK, Panel, Sheet
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, TimedRequest, TopicEngines

DRAFTS = 4
# A text that comes again, and code that follows a pattern; and how many tokens of each are made.
TEXTS = {
    "a list": (
        "1. Get in line at the lift.\n2. Sit down on the chair.\n3. Lower the bar.\n\nAgain, step by step:\n"
        "1. Get in line at",
        24,
    ),
    "code": (
        "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\n"
        "def multiply(a, b):\n    return a",
        20,
    ),
}


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


def run(engines: TopicEngines, texts: Mapping[str, tuple[str, int]] = TEXTS) -> SpeculationData:
    encode = engines.loaded.tokenizer.encode
    requests = [
        TimedRequest(name, tuple(encode(text, add_special_tokens=False)), new) for name, (text, new) in texts.items()
    ]
    drafted = engines.record(requests, speculate="ngram", draft_length=DRAFTS, prefix_caching=False)
    plain = engines.record(requests, prefix_caching=False)
    rows: dict[str, list[Row]] = {name: [] for name in texts}
    for step in drafted.steps:
        for chunk in step.chunks:
            if chunk.samples:
                *right, own = step.sampled[chunk.request]
                row = Row(tuple(engines.labels(chunk.drafts)), len(right), engines.labels([own])[0])
                rows[chunk.request].append(row)
    same = all(drafted.output(name)[:new] == plain.output(name)[:new] for name, (_, new) in texts.items())
    return SpeculationData({name: tuple(steps) for name, steps in rows.items()}, DRAFTS, same, drafted, plain)


def _plain_steps(data: SpeculationData, name: str) -> int:
    return sum(name in step.sampled for step in data.plain.steps)


def draw(data: SpeculationData) -> Sheet:
    longest = max(map(len, data.rows.values()))
    sheet = Sheet("Draft several tokens, verify them in one step", size=(12, max(4.5, 1.9 + 0.34 * longest)))
    grid = sheet.grid(1, len(data.rows))
    for column, (name, rows) in enumerate(data.rows.items()):
        panel = sheet.panel(name, grid[0, column])
        panel.title(name, f"{len(rows)} steps instead of {_plain_steps(data, name)}")
        _draw_rows(panel, rows, data.most, longest)
    sheet.legend(
        {
            "accepted": "accepted draft token",
            "rejected": "rejected draft token, or one after it",
            "decode": "the token that every step gives",
        }
    )
    return sheet


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


def figures(data: SpeculationData) -> dict[str, Any]:
    steps = {name: f"{len(rows)} steps instead of {_plain_steps(data, name)}" for name, rows in data.rows.items()}
    every_row = [row for rows in data.rows.values() for row in rows]
    return {
        "accepted": sum(row.accepted for row in every_row),
        "proposed": sum(len(row.drafts) for row in every_row),
        "summary": "; ".join(f"{name}: {count}" for name, count in steps.items()),
        "steps": " and ".join(f"{name} took {count}" for name, count in steps.items()),
        "same": "exactly the same" if data.same_output else "not the same, which must not be",
    }


TOPIC = Topic("speculation", run, {"speculation": draw}, figures)
