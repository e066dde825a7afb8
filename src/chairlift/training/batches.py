"""Texts as rectangles to train on, and some to judge by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift.training.texts import Texts

HELD_OUT = 32  # one question in so many is never trained on
MOST_HELD_OUT = 64  # texts


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [texts, longest], -1 behind the end of each
    asked: Tensor  # [texts]: how many of the first tokens are the question

    @property
    def answered(self) -> Tensor:
        """[texts, longest]: the places that say what comes next in an answer. The first token of an answer is not
        guessed: no guesses are asked for before there is one."""
        places = torch.arange(self.tokens.shape[1])
        return (self.tokens >= 0) & (places >= self.asked[:, None])


def split_batches(texts: Texts, size: int) -> tuple[list[Batch], list[Batch]]:
    """Batches to train on, and batches to judge by. No question is in both: two answers to one are much alike, and a
    head that has learned the one by heart would seem to foresee the other."""
    answers: dict[tuple[int, ...], list[int]] = {}
    rows, asked = texts.split(), texts.asked.tolist()
    for index, (row, count) in enumerate(zip(rows, asked, strict=True)):
        answers.setdefault(tuple(row[:count].tolist()), []).append(index)
    groups = list(answers.values())
    held_out = [index for group in groups[::HELD_OUT] for index in group][:MOST_HELD_OUT]
    trained_on = [index for place, group in enumerate(groups) if place % HELD_OUT for index in group]
    trained_on = trained_on or held_out  # a handful of texts: only good for trying things out
    make = [list(_rectangles([(rows[i], asked[i]) for i in some], size)) for some in (trained_on, held_out)]
    return make[0], make[1]


def _rectangles(texts: Sequence[tuple[Tensor, int]], size: int) -> Iterator[Batch]:
    """Texts of similar length together."""
    by_length = sorted(texts, key=lambda text: len(text[0]))
    for start in range(0, len(by_length), size):
        rows, asked = zip(*by_length[start : start + size], strict=True)
        yield Batch(
            torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1), torch.tensor(asked)
        )
