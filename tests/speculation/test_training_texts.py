"""What a draft head is trained on and judged by."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from chairlift.engine.startup import LoadedModel
from chairlift.lab.bench.speculation.texts import SCENARIOS
from chairlift.lab.training.conversation import CIRCLE, Circles, Turns
from chairlift.lab.training.judging import judge
from chairlift.lab.training.openings import OPENINGS
from chairlift.lab.training.prompts import HELD_OUT, QUESTIONS, SUBJECTS, Questions
from chairlift.lab.training.texts import Texts, write_texts
from chairlift.lab.training.trainable_head import WholeTexts, seen_from
from chairlift.models.decoder import Decoder


def texts_of(loaded: LoadedModel, count: int, length: int, **options: float) -> Texts:
    assert isinstance(loaded.model, Decoder)
    return write_texts(loaded, loaded.model, count, length, 0, [], lambda line: None, **options)


def test_answers_are_what_the_target_says(tiny: LoadedModel) -> None:
    """Texts are written side by side, with a cache; each must be what the target says to what stands before it."""
    texts = texts_of(tiny, 40, 200)
    model = tiny.model
    assert texts.held_out.nonzero()[:, 0].tolist() == [0, HELD_OUT]
    for row in texts.held_out.nonzero()[:, 0]:
        tokens, written = texts.tokens[row].long(), texts.written[row]
        hidden = model.hidden_states(tokens, torch.arange(len(tokens)), WholeTexts(len(tokens)))
        best = model.logits(hidden.last).argmax(-1)
        assert written.sum() > 20
        assert tokens[1:][written[1:]].tolist() == best[:-1][written[1:]].tolist()
    assert not bool((texts.written & torch.isin(texts.tokens, torch.tensor(sorted(tiny.eos_ids)))).any())


def test_texts_are_conversations_in_the_models_own_template(tiny: LoadedModel) -> None:
    turns = Turns.of(tiny)
    assert turns is not None
    texts = texts_of(tiny, 40, 256)
    for tokens, written in zip(texts.tokens.tolist(), texts.written.tolist(), strict=True):
        assert tokens[: len(turns.begin)] == turns.begin
        for place in range(1, len(tokens)):
            if written[place] and not written[place - 1]:
                assert tokens[place - len(turns.answer) : place] == turns.answer, "an answer to something"


def test_writing_stops_when_the_time_is_over(tiny: LoadedModel) -> None:
    assert len(texts_of(tiny, 10_000, 8, seconds=0.0)) == 32


def test_questions_to_judge_by_have_subjects_of_their_own() -> None:
    judged, trained = Questions([], 0, held_out=True), Questions([], 0, held_out=False)
    assert not {judged.first() for _ in range(500)} & {trained.first() for _ in range(5000)}
    assert len({trained.first() for _ in range(5000)}) > 4500
    own = Questions(["a", "b", "c"], 0, held_out=False)
    assert {own.first() for _ in range(50)} == {"b", "c"}


def test_no_question_is_one_of_the_benchs() -> None:
    asked = {SCENARIOS["chat"](index) for index in range(64)}
    subject = "(?:" + "|".join(map(re.escape, SUBJECTS)) + ")"
    for question in QUESTIONS:
        pattern = re.compile(subject.join(map(re.escape, question.split("{}"))))
        assert not [text for text in asked if pattern.fullmatch(text)]
    assert re.compile(subject.join(map(re.escape, QUESTIONS[0].split("{}")))).fullmatch("What is chess?")


def test_no_question_is_nearly_one_of_the_benchs() -> None:
    """With any few words in the place of a subject, none can become one; none begins as they do; none is about the
    same; and what the target makes of a beginning is none of them."""
    asked = [SCENARIOS["chat"](index) for index in range(12)]
    for question in QUESTIONS:
        pattern = re.compile(r"\S+(?: \S+){0,3}".join(map(re.escape, question.split("{}"))))
        for text in asked:
            assert not pattern.fullmatch(text), question
            assert question.split()[:4] != text.split()[:4]
    for subject in SUBJECTS:
        one = re.compile(rf"\b{re.escape(subject.removesuffix('s'))}s?\b", re.IGNORECASE)
        assert not [text for text in asked if one.search(text)], subject
    for opening in OPENINGS:
        assert not [text for text in asked if text.startswith(f"{opening} ")], opening


def test_answers_that_go_round_in_circles_are_interrupted(tiny: LoadedModel) -> None:
    texts = texts_of(tiny, 40, 256)
    for tokens, written in zip(texts.tokens.tolist(), texts.written.tolist(), strict=True):
        windows = [
            (tuple(tokens[place - CIRCLE : place]), place)
            for place in range(CIRCLE, len(tokens) + 1)
            if all(written[place - CIRCLE : place])
        ]
        said: set[tuple[int, ...]] = set()
        for window, place in windows:
            assert window not in said or place == len(tokens) or not written[place], "it may not go on"
            said.add(window)


def test_what_was_said_before_is_noticed_within_answers_only() -> None:
    circles = Circles(rows=2, length=64)
    phrase = list(range(100, 100 + CIRCLE))
    first = [*phrase, 7, *phrase]
    for column, token in enumerate(first):
        # The second text is the same, but it is a question.
        again = circles.take_in(column, np.array([token, token]), np.array([True, False]))
        assert again.tolist() == [column == len(first) - 1, False]


def test_a_head_is_judged_by_steps_as_they_would_have_been() -> None:
    """Places 1 to 8 are an answer. Right at depth 0: places 1, 2, 5, 6 and 8; at depth 1: places 2 and 6."""
    written = torch.zeros(1, 10, dtype=torch.bool)
    written[0, 1:9] = True
    hits = torch.zeros(3, 1, 10, dtype=torch.bool)
    hits[0, 0, [1, 2, 5, 6, 8]] = True
    hits[1, 0, [2, 6]] = True
    # Steps: 1 (two right ones), 4 (none), 5 (two), 8 (one).
    verdict = judge([(hits, written)], guesses=3)
    assert verdict.everywhere == 5 / 8
    assert verdict.by_place == pytest.approx((3 / 4, 2 / 3, 0.0))
    assert verdict.tokens_per_step == 9 / 4


def test_a_guess_sees_the_targets_states_and_then_its_own() -> None:
    mask = seen_from(5, 2, torch.device("cpu")).view(5, 3, 5)
    assert mask[4].int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert mask[0].int().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
