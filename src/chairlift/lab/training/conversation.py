"""Who says what in the texts that a target writes: it answers questions, and asks some of them itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.engine.startup import LoadedModel
from chairlift.lab.training.prompts import HELD_OUT, Questions

TEMPERATURES = (0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.8)  # most users ask for the likeliest text, or something near it
CURIOUS = 0.65  # the share of texts in which the target writes the questions, too: it knows more subjects than we do
LED = 0.6  # the share of those questions whose first words are given; of itself it asks for the same things too often
ASKING_TEMPERATURE = 0.9
LONGEST_QUESTION = 48  # that it writes
ANSWER_LENGTHS = (64, 96, 128, 192)  # then someone interrupts it: beginnings are harder to foresee than the rest
# So many tokens that stood in the text before: an answer that goes round in circles is interrupted, too. Small models
# do so after some sentences. That is easily foreseen, and a head that learns mostly from it is good for little else.
CIRCLE = 8
_MARKS = ("FIRST-QUESTION", "FIRST-ANSWER", "SECOND-QUESTION")


@dataclass(frozen=True, slots=True)
class Turns:
    """The tokens around what is said."""

    begin: list[int]  # before the first question
    answer: list[int]  # before an answer
    ask: list[int]  # between an answer and the next question

    @classmethod
    def of(cls, loaded: LoadedModel) -> Turns | None:
        """None: the model has no chat template, and is no one to talk to."""
        tokenizer = loaded.tokenizer
        if tokenizer.chat_template is None:
            return None
        said = zip(("user", "assistant", "user"), _MARKS, strict=True)
        rest, parts = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in said]), []
        for mark in _MARKS:
            part, _, rest = rest.partition(mark)
            parts.append(tokenizer.encode(part, add_special_tokens=False))
        return cls(*parts)


class Conversations:
    """As many texts as there are rows, all written at the same time, one token of each after the other."""

    def __init__(
        self, loaded: LoadedModel, rows: int, length: int, prompts: Sequence[str], seed: int, first: int
    ) -> None:
        """`first`: how many texts there are already."""
        self._loaded = loaded
        self._turns = Turns.of(loaded)
        self._chance = random.Random(f"{seed} {first}")
        # Texts to judge by are the target's likeliest ones: there it is certain which guesses would have been right.
        self.held_out = np.arange(first, first + rows) % HELD_OUT == 0
        temperatures = np.array(TEMPERATURES)[np.arange(first, first + rows) % len(TEMPERATURES)]
        self._temperatures = np.where(self.held_out, 0.0, temperatures)
        self._questions = {side: Questions(prompts, seed + first, held_out=side) for side in (False, True)}
        can_ask = self._turns is not None and bool(self._turns.begin) and not prompts
        self._curious = np.array([can_ask and self._chance.random() < CURIOUS for _ in range(rows)])
        self._ends = np.array(sorted(loaded.eos_ids))
        self.tokens = np.zeros((rows, length), dtype=np.int32)
        self.written = np.zeros((rows, length), dtype=bool)  # by the target, as an answer that goes on
        self._script = np.full((rows, length), -1, dtype=np.int32)  # what is not for the target to choose
        self._asking = np.zeros(rows, dtype=bool)
        self._turn_ends = np.zeros(rows, dtype=np.int64)  # the column by which the turn is over
        self._circles = Circles(rows, length)
        self._encoded: dict[str, list[int]] = {}
        for row in range(rows):
            self._ask(row, 0, [] if self._turns is None else self._turns.begin, first=True)
        self.tokens[:, 0] = self._script[:, 0]

    @property
    def temperatures(self) -> np.ndarray:
        """[rows]: at which the next tokens are drawn."""
        return np.where(self._asking, ASKING_TEMPERATURE, self._temperatures)

    def take_in(self, column: int, chosen: np.ndarray) -> None:
        """What the target would say in this column, where it is asked."""
        free = self._script[:, column] < 0
        said = np.where(free, chosen, self._script[:, column])
        ends = np.isin(said, self._ends)
        self.tokens[:, column] = said
        self.written[:, column] = free & ~self._asking & ~ends
        circling = self._circles.take_in(column, said, self.written[:, column])
        for row in np.flatnonzero(free & (ends | circling | (column >= self._turn_ends))):
            self._next_turn(int(row), column + 1, int(said[row]))

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
        if self._curious[row]:
            led = self._chance.random() < LED
            opening = self._encode(questions.opening()) if led else []
            self._write(row, column, before + opening, min(LONGEST_QUESTION, self.tokens.shape[1] // 4))
            self._asking[row] = True
        elif self._turns is None:  # a few tokens from anywhere are as good as any other beginning
            self._answer(row, column, self._plain_beginning())
        else:
            question = self._encode(questions.first() if first else questions.next())
            self._answer(row, column, before + question + self._turns.answer)

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:  # the same few beginnings come up again and again
            self._encoded[text] = self._loaded.tokenizer.encode(text, add_special_tokens=False)
        return self._encoded[text]

    def _answer(self, row: int, column: int, before: list[int]) -> None:
        self._write(row, column, before, self._chance.choice(ANSWER_LENGTHS))
        self._asking[row] = False

    def _write(self, row: int, column: int, forced: list[int], then: int) -> None:
        """These tokens, and then at most so many that the target chooses."""
        if column == 0:
            forced = forced[: self.tokens.shape[1] // 2]  # so that there is something to learn from in short texts
        end = column + len(forced)
        self._script[row, column:end] = forced[: max(0, self._script.shape[1] - column)]
        self._turn_ends[row] = end + then - 1

    def _plain_beginning(self) -> list[int]:
        return [self._chance.randrange(self._loaded.model.vocab_size) for _ in range(3)]


class Circles:
    """Which of many texts say again what they said before."""

    def __init__(self, rows: int, length: int) -> None:
        self._last = np.zeros((rows, CIRCLE), dtype=np.int64)  # tokens
        self._running = np.zeros(rows, dtype=np.int64)  # how many tokens the answer has
        self._said = np.full((rows, length), -1, dtype=np.int64)  # by column: what the last few tokens were
        # One number for several tokens: which those were cannot be seen in it, but that they differ nearly always can.
        self._factors = np.array([3 ** (11 * place) % 2**31 for place in range(1, CIRCLE + 1)], dtype=np.int64)

    def take_in(self, column: int, tokens: np.ndarray, answered: np.ndarray) -> np.ndarray:
        """tokens, answered [rows]: this column, and what of it belongs to an answer -> whether it was said before."""
        self._last = np.roll(self._last, -1, axis=1)
        self._last[:, -1] = tokens
        self._running = np.where(answered, self._running + 1, 0)
        said = np.where(self._running >= CIRCLE, (self._last * self._factors).sum(axis=1), -1)
        again: np.ndarray = (said >= 0) & (self._said[:, :column] == said[:, None]).any(axis=1)
        self._said[:, column] = said
        return again
