"""Training texts, written by the target: a draft has to match what the target generates, not what people write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.engine.startup import LoadedModel
from chairlift.models.decoder import Decoder
from chairlift_lab.training.conversation import Conversations
from chairlift_lab.training.writer import TextWriter, max_rows

LineReport = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    tokens: Tensor  # [texts, length] int32
    written: Tensor  # [texts, length] bool: tokens that the target wrote in answers, except the last of each
    held_out: Tensor  # [texts] bool: for evaluation only

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".new")  # so that an interruption leaves no partial file
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
    begun = time.monotonic()
    rows = min(count, max_rows(target, length))
    writer = TextWriter(target, rows, length, seed)
    found: list[TrainingTexts] = []
    done, slowest = 0, 0.0
    while done < count and (not found or time.monotonic() - begun + slowest < seconds):
        started = time.monotonic()
        conversations = Conversations(loaded, rows, length, prompts, seed, first=done)
        for column in range(1, length):
            conversations.add_column(
                column, writer.next(conversations.tokens[:, column - 1], column - 1, conversations.temperatures)
            )
        found.append(
            TrainingTexts(*map(torch.from_numpy, (conversations.tokens, conversations.written, conversations.held_out)))
        )
        done += rows
        took = time.monotonic() - started
        slowest = max(slowest, took)
        pace, share = rows * length / took, np.mean(conversations.written)
        report(f"texts      {done:,} of {count:,}, {pace:,.0f} tokens/s, {share:.0%} of them in answers")
    parts = zip(*((some.tokens, some.written, some.held_out) for some in found), strict=True)
    return TrainingTexts(*(torch.cat(part)[:count] for part in parts))
