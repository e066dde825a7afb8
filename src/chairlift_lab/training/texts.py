"""Training texts, written by the target: a draft has to match what the target generates, not what people write.

They are conversations: the target answers questions, and writes some of the questions as well. Our own questions leave
out those of `chairlift bench speculation`, and what is nearly the same or begins with an opening: a head must not be
trained on what it is measured with.

All texts begin and end together, so a step needs no scheduling, only a few large matrix products: about ten times as
many tokens per second as the engine.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.engine.startup import LoadedModel
from chairlift.errors import UnsupportedModel
from chairlift.models.decoder import Decoder

LineReport = Callable[[str], None]
SCORED_AT_ONCE = 1024  # texts, because logits are large
MAX_ROWS = {"cuda": 4096, "cpu": 32}
MEMORY_SHARE = 0.5  # share of the free GPU memory that the KV cache gets


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    tokens: Tensor  # [texts, length] int32
    written: Tensor  # [texts, length] bool: tokens that the target wrote in answers, except the last of each
    held_out: Tensor  # [texts] bool: for evaluation only

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".new")  # An interruption leaves no partial file.
        save_file({"tokens": self.tokens, "written": self.written, "held_out": self.held_out}, unfinished)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> TrainingTexts:
        return cls(**load_file(path))

    def __getitem__(self, chosen: Tensor) -> TrainingTexts:
        return TrainingTexts(self.tokens[chosen], self.written[chosen], self.held_out[chosen])


def write_texts(
    loaded: LoadedModel,
    target: Decoder,
    count: int,
    length: int,
    seed: int,
    prompts: Sequence[str],
    report: LineReport,
    seconds: float = float("inf"),
) -> TrainingTexts:
    """`count` texts of `length` tokens, or as many as `seconds` allow."""
    start = time.monotonic()
    rows = min(count, max_rows(target, length))
    writer = TextWriter(target, rows, length, seed)
    rounds: list[TrainingTexts] = []
    done, slowest = 0, 0.0
    while done < count and (not rounds or time.monotonic() - start + slowest < seconds):
        round_start = time.monotonic()
        conversations = Conversations(loaded, rows, length, prompts, seed, first=done)
        for column in range(1, length):
            before, temperatures = conversations.tokens[:, column - 1], conversations.temperatures
            conversations.add_column(column, writer.next(before, column - 1, temperatures))
        columns = (conversations.tokens, conversations.written, conversations.held_out)
        rounds.append(TrainingTexts(*map(torch.from_numpy, columns)))
        done += rows
        duration = time.monotonic() - round_start
        slowest = max(slowest, duration)
        pace, share = rows * length / duration, np.mean(conversations.written)
        report(f"texts      {done:,} of {count:,}, {pace:,.0f} tokens/s, {share:.0%} of them in answers")
    parts = zip(*((texts.tokens, texts.written, texts.held_out) for texts in rounds), strict=True)
    return TrainingTexts(*(torch.cat(part)[:count] for part in parts))


class TextWriter(StepAttention):
    """Writes the next token of every text, with a contiguous KV cache."""

    def __init__(self, target: Decoder, rows: int, length: int, seed: int) -> None:
        layers = target.attention_layers
        refuse_unusual_attention(layers)
        self._target = target
        self._generator = torch.Generator(target.device).manual_seed(seed)
        self._column = 0  # the column of the new tokens
        self._cache = [
            torch.empty(2, rows, layer.num_kv_heads, length, layer.head_dim, dtype=target.dtype, device=target.device)
            for layer in layers
        ]

    @torch.inference_mode()
    def next(self, tokens: np.ndarray, column: int, temperatures: np.ndarray) -> np.ndarray:
        """The tokens [rows] of a column -> the next ones, sampled at these temperatures. Columns come in order."""
        target, device = self._target, self._target.device
        self._column = column
        positions = torch.full((len(tokens),), column, device=device)
        batch = StepBatch(torch.from_numpy(tokens).long().to(device), positions)
        hidden = target.hidden_states(batch, self).last
        temperature = torch.from_numpy(temperatures).float().to(device)
        parts = zip(hidden.split(SCORED_AT_ONCE), temperature.split(SCORED_AT_ONCE), strict=True)
        following: np.ndarray = torch.cat([self._choose(*part) for part in parts]).cpu().numpy()
        return following

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        cache = self._cache[layer.index]
        cache[0, :, :, self._column] = k
        cache[1, :, :, self._column] = v
        keys, values = cache[:, :, :, : self._column + 1]
        # Heads that share keys are laid out as if they were several tokens, so that the keys are read once for all.
        grouped = q.unflatten(1, (layer.num_kv_heads, -1))
        return F.scaled_dot_product_attention(grouped, keys, values, scale=layer.scale).flatten(1, 2)

    def _choose(self, hidden: Tensor, temperatures: Tensor) -> Tensor:
        scores = self._target.logits(hidden)
        chosen = scores.argmax(dim=-1)
        sampled = temperatures.nonzero()[:, 0]
        if len(sampled):
            weights = (scores[sampled].float() / temperatures[sampled, None]).softmax(dim=-1)
            # The arg max of weights divided by exponential variates is a sample with those weights.
            variates = torch.empty_like(weights).exponential_(generator=self._generator).clamp_min_(1e-30)
            chosen[sampled] = (weights / variates).argmax(dim=-1)
        return chosen


def max_rows(target: Decoder, length: int) -> int:
    """The most texts that can be written at once."""
    most = MAX_ROWS[target.device.type]
    if target.device.type != "cuda":
        return most
    numbers = sum(layer.numbers_per_token for layer in target.attention_layers)
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(most, int(MEMORY_SHARE * free) // (numbers * length * target.dtype.itemsize)))


def refuse_unusual_attention(layers: tuple[AttentionLayer, ...]) -> None:
    if any(layer.window or layer.softcap or layer.chunk or layer.sinks or layer.latent_dim for layer in layers):
        raise UnsupportedModel(
            "a draft head cannot be trained for models with latent attention, or attention with a window, chunks, a "
            "soft-cap or sinks"
        )


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
            self._answer(row, column, [self._random.randrange(self._loaded.model.vocab_size) for _ in range(3)])
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
