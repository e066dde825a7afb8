"""Texts that the target writes itself: what a draft has to foresee is what the target says, not what is true."""

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
from chairlift.lab.training.conversation import Conversations
from chairlift.lab.training.writer import Writer, most_rows
from chairlift.models.decoder import Decoder

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Texts:
    tokens: Tensor  # [texts, length] int32
    written: Tensor  # [texts, length] bool: tokens of answers, which the target wrote, but for the last of each
    held_out: Tensor  # [texts] bool: to judge by, not to train on

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".new")  # an interruption leaves no half of a file
        save_file({"tokens": self.tokens, "written": self.written, "held_out": self.held_out}, unfinished)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        return cls(**load_file(path))

    def __getitem__(self, chosen: Tensor) -> Texts:
        return Texts(self.tokens[chosen], self.written[chosen], self.held_out[chosen])


def write_texts(
    loaded: LoadedModel,
    target: Decoder,
    count: int,
    length: int,
    seed: int,
    prompts: Sequence[str],
    say: Report,
    seconds: float = float("inf"),
) -> Texts:
    """`count` texts of `length` tokens, or as many as there is time for."""
    begun = time.monotonic()
    rows = min(count, most_rows(target, length))
    writer = Writer(target, rows, length, seed)
    found: list[Texts] = []
    done, slowest = 0, 0.0
    while done < count and (not found or time.monotonic() - begun + slowest < seconds):
        started = time.monotonic()
        talks = Conversations(loaded, rows, length, prompts, seed, first=done)
        for column in range(1, length):
            talks.take_in(column, writer.next(talks.tokens[:, column - 1], column - 1, talks.temperatures))
        found.append(Texts(*map(torch.from_numpy, (talks.tokens, talks.written, talks.held_out))))
        done += rows
        took = time.monotonic() - started
        slowest = max(slowest, took)
        pace, share = rows * length / took, np.mean(talks.written)
        say(f"texts      {done:,} of {count:,}, {pace:,.0f} tokens/s, {share:.0%} of them in answers")
    parts = zip(*((some.tokens, some.written, some.held_out) for some in found), strict=True)
    return Texts(*(torch.cat(part)[:count] for part in parts))
