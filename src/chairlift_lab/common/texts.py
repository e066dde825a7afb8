"""The texts of the benches: what speculation is measured on, and what lossy options are judged on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_NAMES = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
_TOWNS = ("London", "Paris", "Vienna", "Lisbon", "Oslo", "Prague", "Zurich", "Madrid")
_THINGS = ("price", "weight", "length", "score", "speed", "distance", "volume", "rating")
_QUESTIONS = (
    "What makes a good teacher?",
    "Describe a walk through a forest in autumn.",
    "Why do people enjoy sad songs?",
    "How would you explain money to someone from another planet?",
    "What should I think about before I move to another city?",
    "Write a letter from a lighthouse keeper to his sister.",
    "What is the difference between knowledge and wisdom?",
    "Suggest a weekend plan for a rainy day.",
    "How did people tell the time before clocks?",
    "What can we learn from failure?",
    "Invent a holiday and describe how it is celebrated.",
    "Why is the sky blue during the day and red in the evening?",
)
_STORY = (
    "The bridge over the {town} river was closed on Monday after engineers found a crack in the main cable. "
    '"We could not take the risk," said {name}, who leads the inspection team. "Forty thousand people cross this '
    'bridge every day." Repairs will take about three weeks and cost two million. The city has promised more ferries '
    'until then. "It is the right decision, but it should have been made years ago," said a shop owner nearby.'
)


def extraction(index: int) -> str:
    """Copy a table."""
    rows = [
        f"{name}, {_TOWNS[(index + place) % len(_TOWNS)]}, {name.split()[0].lower()}{index}@example.com"
        for place, name in enumerate(_NAMES)
    ]
    table = "\n".join(rows)
    return f"Here is a list of people:\n{table}\n\nRepeat the whole list, one person per line, exactly as it is above."


def code_edit(index: int) -> str:
    """Rewrite a program with a small change."""
    thing = _THINGS[index % len(_THINGS)]
    program = (
        f"def best_{thing}(items):\n    best = None\n    for item in items:\n        if item.{thing} is None:\n"
        f"            continue\n        if best is None or item.{thing} > best.{thing}:\n            best = item\n"
        f"    return best\n\n\ndef mean_{thing}(items):\n    total = 0\n    count = 0\n    for item in items:\n"
        f"        if item.{thing} is None:\n            continue\n        total += item.{thing}\n        count += 1\n"
        f"    return total / count if count else None\n"
    )
    return f"```python\n{program}```\n\nRename `items` to `things` in this program. Answer with the whole program only."


def quotes(index: int) -> str:
    """Summarise a text with quotes from it."""
    story = _STORY.format(town=_TOWNS[index % len(_TOWNS)], name=_NAMES[index % len(_NAMES)])
    return f"{story}\n\nSummarise this text. Quote the most important sentences word for word."


def chat(index: int) -> str:
    """Answer an open question, without repeating the prompt."""
    question = _QUESTIONS[index % len(_QUESTIONS)]
    return question if index < len(_QUESTIONS) else f"{question} (Answer no. {index}.)"


# Of these, only the output of chat does not repeat its prompt.
SCENARIOS: dict[str, Callable[[int], str]] = {
    "extraction": extraction,
    "code-edit": code_edit,
    "quotes": quotes,
    "chat": chat,
}

# Prose, instructions, code, tables, dialogue and other languages, by which lossy options are judged.
QUALITY_TEXTS: tuple[str, ...] = tuple(
    json.loads(Path(__file__).with_name("quality_texts.json").read_text(encoding="utf-8"))
)
