"""Conversations that the target model writes: it answers questions, and writes some of the questions as well.

Our own questions leave out those of `chairlift bench speculation`, and what is nearly the same or begins with an
opening: a head must not be trained on what it is measured with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chairlift.engine.startup import LoadedModel

HELD_OUT = 32  # one text in 32, and its subjects, is never trained on
FOLLOW_UP_SHARE = 0.25  # share of follow-ups among the questions after the first
_LISTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
QUESTIONS, SUBJECTS, FOLLOW_UPS = _LISTS["questions"], _LISTS["subjects"], _LISTS["follow_ups"]
# Completed by the target, they make more, and more natural, questions than a list.
OPENINGS = _LISTS["openings"]
TEMPERATURES = (0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.8)  # mostly greedy, as most users sample
SELF_ASKED = 0.65  # share of texts whose questions the target writes: they cover more subjects than our lists
OPENED = 0.6  # share of those questions whose first words are given; without them, questions repeat too often
QUESTION_TEMPERATURE = 0.9
MAX_QUESTION_LENGTH = 48  # the most tokens of a question that the target writes
ANSWER_LENGTHS = (64, 96, 128, 192)  # then the answer is cut: beginnings are harder to draft than the rest
# An answer that repeats this many tokens of the text is cut as well. Small models repeat themselves after some
# sentences. Repetition is easy to draft, and a head trained mostly on it drafts other text badly.
REPEATED_TOKENS = 8
_MARKS = ("FIRST-QUESTION", "FIRST-ANSWER", "SECOND-QUESTION")


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The tokens of the chat template around questions and answers."""

    begin: list[int]  # They stand before the first question.
    answer: list[int]  # They stand before an answer.
    ask: list[int]  # They stand between an answer and the next question.

    @classmethod
    def of(cls, loaded: LoadedModel) -> TurnMarkers | None:
        """None if the model has no chat template."""
        tokenizer = loaded.tokenizer
        if tokenizer.chat_template is None:
            return None
        messages = zip(("user", "assistant", "user"), _MARKS, strict=True)
        rest, parts = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages]), []
        for mark in _MARKS:
            part, _, rest = rest.partition(mark)
            parts.append(tokenizer.encode(part, add_special_tokens=False))
        return cls(*parts)


class Conversations:
    """One text per row, all written at the same time, a column of tokens after the other."""

    def __init__(
        self, loaded: LoadedModel, rows: int, length: int, prompts: Sequence[str], seed: int, first: int
    ) -> None:
        """`first`: number of the first row's text."""
        self._loaded = loaded
        self._turns = TurnMarkers.of(loaded)
        self._random = random.Random(f"{seed} {first}")
        # Held-out texts are greedy: there it is certain which draft tokens would have been accepted.
        self.held_out = np.arange(first, first + rows) % HELD_OUT == 0
        temperatures = np.array(TEMPERATURES)[np.arange(first, first + rows) % len(TEMPERATURES)]
        self._temperatures = np.where(self.held_out, 0.0, temperatures)
        self._questions = {
            held_out: QuestionSource(prompts, seed + first, held_out=held_out) for held_out in (False, True)
        }
        can_ask = self._turns is not None and bool(self._turns.begin) and not prompts
        self._self_asked = np.array([can_ask and self._random.random() < SELF_ASKED for _ in range(rows)])
        self._ends = np.array(sorted(loaded.eos_ids))
        self.tokens = np.zeros((rows, length), dtype=np.int32)
        # Tokens that the target wrote in an answer, except the last of each.
        self.written = np.zeros((rows, length), dtype=bool)
        # Tokens that the target does not choose; -1 elsewhere.
        self._script = np.full((rows, length), -1, dtype=np.int32)
        self._asking = np.zeros(rows, dtype=bool)
        self._turn_ends = np.zeros(rows, dtype=np.int64)  # the column with which the turn ends at the latest
        self._repetitions = RepetitionDetector(rows, length)
        self._encoded: dict[str, list[int]] = {}
        for row in range(rows):
            self._ask(row, 0, [] if self._turns is None else self._turns.begin, first=True)
        self.tokens[:, 0] = self._script[:, 0]

    @property
    def temperatures(self) -> np.ndarray:
        """[rows]: the temperature of each row's next token."""
        return np.where(self._asking, QUESTION_TEMPERATURE, self._temperatures)

    def add_column(self, column: int, chosen: np.ndarray) -> None:
        """Fill a column: with the target's tokens `chosen` [rows] where the script leaves it the choice."""
        free = self._script[:, column] < 0
        tokens = np.where(free, chosen, self._script[:, column])
        ends = np.isin(tokens, self._ends)
        self.tokens[:, column] = tokens
        self.written[:, column] = free & ~self._asking & ~ends
        repeats = self._repetitions.add_column(column, tokens, self.written[:, column])
        for row in np.flatnonzero(free & (ends | repeats | (column >= self._turn_ends))):
            self._next_turn(int(row), column + 1, int(tokens[row]))

    def _next_turn(self, row: int, column: int, last: int) -> None:
        if self._turns is None:
            self._ask(row, column, [], first=False)
            return
        between = self._turns.answer if self._asking[row] else self._turns.ask
        between = between[1:] if between[:1] == [last] else between
        if self._asking[row]:
            self._answer(row, column, between)
        else:
            self._ask(row, column, between, first=False)

    def _ask(self, row: int, column: int, before: list[int], *, first: bool) -> None:
        questions = self._questions[bool(self.held_out[row])]
        if self._self_asked[row]:
            opened = self._random.random() < OPENED
            opening = self._encode(questions.opening()) if opened else []
            self._write(row, column, before + opening, min(MAX_QUESTION_LENGTH, self.tokens.shape[1] // 4))
            self._asking[row] = True
        elif self._turns is None:  # A text begins with random tokens if there is no chat template.
            self._answer(row, column, self._random_tokens())
        else:
            question = self._encode(questions.first() if first else questions.next())
            self._answer(row, column, before + question + self._turns.answer)

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:  # the same openings are used again and again
            self._encoded[text] = self._loaded.tokenizer.encode(text, add_special_tokens=False)
        return self._encoded[text]

    def _answer(self, row: int, column: int, before: list[int]) -> None:
        self._write(row, column, before, self._random.choice(ANSWER_LENGTHS))
        self._asking[row] = False

    def _write(self, row: int, column: int, forced: list[int], max_free: int) -> None:
        """Script the `forced` tokens, then let the target choose at most `max_free`."""
        if column == 0:
            forced = forced[: self.tokens.shape[1] // 2]  # leaves an answer in short texts
        end = column + len(forced)
        self._script[row, column:end] = forced[: max(0, self._script.shape[1] - column)]
        self._turn_ends[row] = end + max_free - 1

    def _random_tokens(self) -> list[int]:
        return [self._random.randrange(self._loaded.model.vocab_size) for _ in range(3)]


class RepetitionDetector:
    """Finds texts whose answer repeats its last REPEATED_TOKENS tokens."""

    def __init__(self, rows: int, length: int) -> None:
        self._last = np.zeros((rows, REPEATED_TOKENS), dtype=np.int64)  # tokens of each row
        self._answer_lengths = np.zeros(rows, dtype=np.int64)
        self._hashes = np.full((rows, length), -1, dtype=np.int64)  # a hash of the last tokens, by column
        self._factors = np.array([3 ** (11 * index) % 2**31 for index in range(1, REPEATED_TOKENS + 1)], dtype=np.int64)

    def add_column(self, column: int, tokens: np.ndarray, answered: np.ndarray) -> np.ndarray:
        """tokens, answered [rows]: a column, and whether it is part of an answer -> whether it completes a repeat."""
        self._last = np.roll(self._last, -1, axis=1)
        self._last[:, -1] = tokens
        self._answer_lengths = np.where(answered, self._answer_lengths + 1, 0)
        hashes = np.where(self._answer_lengths >= REPEATED_TOKENS, (self._last * self._factors).sum(axis=1), -1)
        repeats: np.ndarray = (hashes >= 0) & (self._hashes[:, :column] == hashes[:, None]).any(axis=1)
        self._hashes[:, column] = hashes
        return repeats


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
