"""Training texts of draft heads, and their evaluation."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from chairlift.attention.batch import StepBatch
from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift_lab.common.workload import SCENARIOS
from chairlift_lab.training.texts import (
    HELD_OUT,
    OPENINGS,
    QUESTIONS,
    REPEATED_TOKENS,
    SUBJECTS,
    QuestionSource,
    RepetitionDetector,
    TrainingTexts,
    TurnMarkers,
    write_texts,
)
from chairlift_lab.training.trainable_head import WholeTextAttention, evaluate, visible_positions


def texts_of(loaded: LoadedModel, count: int, length: int, **options: float) -> TrainingTexts:
    assert isinstance(loaded.model, Decoder)
    return write_texts(loaded, loaded.model, count, length, 0, [], lambda line: None, **options)


def test_answers_are_the_targets_likeliest_tokens(tiny: LoadedModel) -> None:
    """Texts are generated together with a KV cache, and must equal those of a full forward pass."""
    texts = texts_of(tiny, 40, 200)
    model = tiny.model
    assert texts.held_out.nonzero()[:, 0].tolist() == [0, HELD_OUT]
    for row in texts.held_out.nonzero()[:, 0]:
        tokens, written = texts.tokens[row].long(), texts.written[row]
        hidden = model.hidden_states(StepBatch(tokens, torch.arange(len(tokens))), WholeTextAttention(len(tokens)))
        best = model.logits(hidden.last).argmax(-1)
        assert written.sum() > 20
        assert tokens[1:][written[1:]].tolist() == best[:-1][written[1:]].tolist()
    assert not bool((texts.written & torch.isin(texts.tokens, torch.tensor(sorted(tiny.eos_ids)))).any())


def test_texts_are_conversations_in_the_models_own_template(tiny: LoadedModel) -> None:
    turns = TurnMarkers.of(tiny)
    assert turns is not None
    texts = texts_of(tiny, 40, 256)
    for tokens, written in zip(texts.tokens.tolist(), texts.written.tolist(), strict=True):
        assert tokens[: len(turns.begin)] == turns.begin
        for position in range(1, len(tokens)):
            if written[position] and not written[position - 1]:
                assert tokens[position - len(turns.answer) : position] == turns.answer, "an answer follows a question"


def test_writing_stops_at_the_time_limit(tiny: LoadedModel) -> None:
    assert len(texts_of(tiny, 10_000, 8, seconds=0.0)) == 32


def test_held_out_questions_have_subjects_of_their_own() -> None:
    held_out, trained = QuestionSource([], 0, held_out=True), QuestionSource([], 0, held_out=False)
    assert not {held_out.first() for _ in range(500)} & {trained.first() for _ in range(5000)}
    assert len({trained.first() for _ in range(5000)}) > 4500
    own = QuestionSource(["a", "b", "c"], 0, held_out=False)
    assert {own.first() for _ in range(50)} == {"b", "c"}


def test_no_question_equals_one_of_the_bench() -> None:
    asked = {SCENARIOS["chat"](index) for index in range(64)}
    subject = "(?:" + "|".join(map(re.escape, SUBJECTS)) + ")"
    for question in QUESTIONS:
        pattern = re.compile(subject.join(map(re.escape, question.split("{}"))))
        assert not [text for text in asked if pattern.fullmatch(text)]
    assert re.compile(subject.join(map(re.escape, QUESTIONS[0].split("{}")))).fullmatch("What is chess?")


def test_no_question_resembles_one_of_the_bench() -> None:
    """Not with up to four other words as its subject, not by its first four words, not by its subject, and not by an
    opening that the target completes."""
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


def test_answers_that_repeat_themselves_are_cut(tiny: LoadedModel) -> None:
    texts = texts_of(tiny, 40, 256)
    for tokens, written in zip(texts.tokens.tolist(), texts.written.tolist(), strict=True):
        windows = [
            (tuple(tokens[end - REPEATED_TOKENS : end]), end)
            for end in range(REPEATED_TOKENS, len(tokens) + 1)
            if all(written[end - REPEATED_TOKENS : end])
        ]
        seen: set[tuple[int, ...]] = set()
        for window, end in windows:
            assert window not in seen or end == len(tokens) or not written[end], "the answer ends at a repeat"
            seen.add(window)


def test_repetition_is_detected_in_answers_only() -> None:
    detector = RepetitionDetector(rows=2, length=64)
    phrase = list(range(100, 100 + REPEATED_TOKENS))
    first = [*phrase, 7, *phrase]
    for column, token in enumerate(first):
        # The second row has the same tokens, but in a question.
        repeats = detector.add_column(column, np.array([token, token]), np.array([True, False]))
        assert repeats.tolist() == [column == len(first) - 1, False]


def test_a_head_is_evaluated_by_the_steps_it_would_have_made() -> None:
    """Positions 1 to 8 are an answer. Right at depth 0: positions 1, 2, 5, 6 and 8; at depth 1: positions 2 and 6."""
    written = torch.zeros(1, 10, dtype=torch.bool)
    written[0, 1:9] = True
    hits = torch.zeros(3, 1, 10, dtype=torch.bool)
    hits[0, 0, [1, 2, 5, 6, 8]] = True
    hits[1, 0, [2, 6]] = True
    # Steps begin at 1 (two right), 4 (none), 5 (two) and 8 (one).
    accuracy = evaluate([(hits, written)], draft_length=3)
    assert accuracy.everywhere == 5 / 8
    assert accuracy.by_place == pytest.approx((3 / 4, 2 / 3, 0.0))
    assert accuracy.tokens_per_step == 9 / 4


def test_a_draft_token_attends_to_the_targets_states_and_then_to_its_own() -> None:
    mask = visible_positions(5, 2, torch.device("cpu")).view(5, 3, 5)
    assert mask[4].int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert mask[0].int().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
