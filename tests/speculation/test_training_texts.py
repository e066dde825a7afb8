"""What a draft head is trained on and judged by."""

from __future__ import annotations

import random

import torch

from chairlift.bench.speculation_texts import SCENARIOS
from chairlift.training.batches import Batch, split_batches
from chairlift.training.prompts import questions
from chairlift.training.texts import Texts


def many_answers(num_questions: int, times: int, chance: random.Random) -> Texts:
    """Each question is two tokens, asked so many times."""
    rows = [
        [question, question + 1, *(chance.randrange(50) for _ in range(chance.randint(1, 9)))]
        for _ in range(times)
        for question in range(num_questions)
    ]
    lengths = torch.tensor([len(row) for row in rows])
    together = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    return Texts(together, lengths, torch.full((len(rows),), 2))


def asked_in(batches: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch.tokens]


def test_no_question_is_both_trained_on_and_judged_by() -> None:
    trained_on, held_out = split_batches(many_answers(100, 3, random.Random(1)), size=8)
    seen, unseen = asked_in(trained_on), asked_in(held_out)
    assert len(seen) + len(unseen) == 300
    assert set(unseen) == {0, 32, 64, 96}
    assert not set(seen) & set(unseen)


def test_only_answers_count_and_not_what_fills_them_up() -> None:
    texts = Texts(torch.tensor([5, 6, 7, 8, 9, 5, 6, 7], dtype=torch.int32), torch.tensor([5, 3]), torch.tensor([2, 2]))
    (batch,), _ = split_batches(texts, size=2)
    assert batch.tokens.tolist() == [[5, 6, 7, -1, -1], [5, 6, 7, 8, 9]]
    assert batch.answered.tolist() == [[False, False, True, False, False], [False, False, True, True, True]]


def test_the_questions_differ_and_are_not_those_of_the_bench() -> None:
    some = questions(4000, random.Random(0))
    assert len(set(some)) == 4000
    assert not set(some) & {SCENARIOS["chat"](index) for index in range(64)}
