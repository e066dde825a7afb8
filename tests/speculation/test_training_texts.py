"""What a draft head is trained on and judged by."""

from __future__ import annotations

import re

import torch

from chairlift.bench.speculation_texts import SCENARIOS
from chairlift.execution.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift.training.conversation import Turns
from chairlift.training.prompts import HELD_OUT, QUESTIONS, SUBJECTS, Questions
from chairlift.training.texts import Texts, write_texts
from chairlift.training.trainable_head import WholeTexts, seen_from


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
        best = model.logits(model.hidden_states(tokens, torch.arange(len(tokens)), WholeTexts(len(tokens)))).argmax(-1)
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


def test_a_guess_sees_the_targets_states_and_then_its_own() -> None:
    mask = seen_from(5, 2, torch.device("cpu")).view(5, 3, 5)
    assert mask[4].int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert mask[0].int().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
