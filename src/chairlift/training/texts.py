"""Texts that the target writes itself: what a draft has to foresee is what the target says, not what is true."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.sampling import SamplingParams
from chairlift.execution.config import EngineConfig
from chairlift.execution.startup import LoadedModel, start_engine
from chairlift.training.prompts import questions

Report = Callable[[str], None]
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # most users ask for the likeliest text, or something near it
AGAIN = (0.7, 1.0)  # when a question is asked once more: its likeliest answer would be the same


@dataclass(frozen=True, slots=True)
class Texts:
    tokens: Tensor  # [N] int32, one text after the other
    lengths: Tensor  # [texts] int64
    asked: Tensor  # [texts] int64: how many of its first tokens the target did not write

    def __len__(self) -> int:
        return len(self.lengths)

    def save(self, path: Path) -> None:
        save_file({"tokens": self.tokens, "lengths": self.lengths, "asked": self.asked}, path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        return cls(**load_file(path))

    def split(self) -> list[Tensor]:
        return list(self.tokens.long().split(self.lengths.tolist()))


def write_texts(
    loaded: LoadedModel, config: EngineConfig, count: int, length: int, seed: int, prompts: Sequence[str], say: Report
) -> Texts:
    """`count` texts of at most `length` tokens: answers to questions, and what the target says unasked."""
    chance = random.Random(seed)
    engine = start_engine(loaded, config).engine
    found: dict[str, list[int]] = {}
    asked: dict[tuple[int, ...], int] = {}  # how often
    sizes = []
    for index, start in enumerate(_starts(loaded, count, prompts, chance)):
        start = start[: length // 2]
        before = asked.get(tuple(start), 0)
        asked[tuple(start)] = before + 1
        temperatures = AGAIN if before else TEMPERATURES
        params = SamplingParams(
            temperature=temperatures[(index + before) % len(temperatures)],
            top_p=0.95,
            max_tokens=length - len(start),
            seed=seed + index,
            detokenize=False,
        )
        (request_id,) = engine.submit(start, params)
        found[request_id] = list(start)
        sizes.append(len(start))
    engine.expect_no_more()
    done = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                found[event.request_id].append(event.token)
            elif isinstance(event, RequestFinished):
                done += 1
                if done % max(1, count // 20) == 0:
                    say(f"texts      {done:,} of {count:,}")
        engine.check_alive()
    engine.shut_down()
    written = [(tokens, size) for tokens, size in zip(found.values(), sizes, strict=True) if len(tokens) > size]
    together = torch.tensor([token for tokens, _ in written for token in tokens], dtype=torch.int32)
    lengths, starts = [len(tokens) for tokens, _ in written], [size for _, size in written]
    return Texts(together, torch.tensor(lengths), torch.tensor(starts))


def _starts(loaded: LoadedModel, count: int, prompts: Sequence[str], chance: random.Random) -> list[list[int]]:
    """With a chat template: questions as it renders them. Without: a few tokens from anywhere, which are as good as
    any other beginning."""
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template is not None:
        asked = [prompts[index % len(prompts)] for index in range(count)] if prompts else questions(count, chance)
        return [tokenizer.encode_chat([{"role": "user", "content": text}])[1] for text in asked]
    if prompts:
        return [tokenizer.encode(prompts[index % len(prompts)]) for index in range(count)]
    return [[chance.randrange(loaded.model.vocab_size) for _ in range(3)] for _ in range(count)]
