"""Questions on many subjects for a chat model, and openings of questions that the target completes.

Those of `chairlift bench speculation` are left out, and so is what is nearly the same or begins with an opening: a head
must not be trained on what it is measured with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

HELD_OUT = 32  # one text in 32, and its subjects, is never trained on
FOLLOW_UP_SHARE = 0.25  # share of follow-ups among the questions after the first
_LISTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
QUESTIONS, SUBJECTS, FOLLOW_UPS = _LISTS["questions"], _LISTS["subjects"], _LISTS["follow_ups"]
# Completed by the target, they make more, and more natural, questions than a list.
OPENINGS = _LISTS["openings"]


class QuestionSource:
    """An endless supply of questions. Held-out questions have other subjects than those to train on."""

    def __init__(self, prompts: Sequence[str], seed: int, *, held_out: bool) -> None:
        """`prompts`: questions to use instead of the built-in ones."""
        self._prompts = _part(prompts, held_out) or prompts
        self._subjects = _part(SUBJECTS, held_out)
        self._openings = _part(OPENINGS, held_out)
        self._random = random.Random(f"{seed} {held_out}")

    def first(self) -> str:
        if self._prompts:
            return self._random.choice(self._prompts)
        question = self._random.choice(QUESTIONS)
        return question.format(*self._random.sample(self._subjects, question.count("{}")))

    def next(self) -> str:
        """A later question of a conversation: a follow-up, or one on another subject."""
        return self._random.choice(FOLLOW_UPS) if self._random.random() < FOLLOW_UP_SHARE else self.first()

    def opening(self) -> str:
        """The first words of a question that the target completes."""
        return self._random.choice(self._openings)


def _part(items: Sequence[str], held_out: bool) -> Sequence[str]:
    return [item for index, item in enumerate(items) if (index % HELD_OUT == 0) == held_out]
