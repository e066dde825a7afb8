"""The texts of the benches: what speculation is measured on, and what lossy options are judged on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_NAMES, _TOWNS, _THINGS, _QUESTIONS, _STORY = (
    _TEXTS[part] for part in ("names", "towns", "things", "questions", "story")
)

# Prose, instructions, code, tables, dialogue and other languages, by which lossy options are judged.
QUALITY_TEXTS: tuple[str, ...] = tuple(_TEXTS["quality"])


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
