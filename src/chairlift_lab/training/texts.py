"""Training texts, written by the target: a draft has to match what the target generates, not what people write.

All texts begin and end together, so a step needs no scheduling, only a few large matrix products: about ten times as
many tokens per second as the engine.
"""

from __future__ import annotations

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
from chairlift_lab.training.conversation import Conversations

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
            conversations.add_column(
                column, writer.next(conversations.tokens[:, column - 1], column - 1, conversations.temperatures)
            )
        rounds.append(
            TrainingTexts(*map(torch.from_numpy, (conversations.tokens, conversations.written, conversations.held_out)))
        )
        done += rows
        duration = time.monotonic() - round_start
        slowest = max(slowest, duration)
        pace, share = rows * length / duration, np.mean(conversations.written)
        report(f"texts      {done:,} of {count:,}, {pace:,.0f} tokens/s, {share:.0%} of them in answers")
    parts = zip(*((texts.tokens, texts.written, texts.held_out) for texts in rounds), strict=True)
    return TrainingTexts(*(torch.cat(part)[:count] for part in parts))


class TextWriter:
    def __init__(self, target: Decoder, rows: int, length: int, seed: int) -> None:
        self._target = target
        self._attention = GrowingTextAttention(target, rows, length)
        self._generator = torch.Generator(target.device).manual_seed(seed)

    @torch.inference_mode()
    def next(self, tokens: np.ndarray, column: int, temperatures: np.ndarray) -> np.ndarray:
        """The tokens [rows] of a column -> the next ones, sampled at these temperatures. Columns come in order."""
        target, device = self._target, self._target.device
        self._attention.column = column
        positions = torch.full((len(tokens),), column, device=device)
        hidden = target.hidden_states(
            StepBatch(torch.from_numpy(tokens).long().to(device), positions), self._attention
        ).last
        temperature = torch.from_numpy(temperatures).float().to(device)
        parts = zip(hidden.split(SCORED_AT_ONCE), temperature.split(SCORED_AT_ONCE), strict=True)
        chosen = [self._choose(*part) for part in parts]
        following: np.ndarray = torch.cat(chosen).cpu().numpy()
        return following

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


class GrowingTextAttention(StepAttention):
    """Attention of one more token of every text, with a contiguous KV cache."""

    def __init__(self, target: Decoder, rows: int, length: int) -> None:
        self.column = 0  # the column of the new tokens
        layers = target.attention_layers
        refuse_unusual_attention(layers)
        self._cache = [
            torch.empty(2, rows, layer.num_kv_heads, length, layer.head_dim, dtype=target.dtype, device=target.device)
            for layer in layers
        ]

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        cache = self._cache[layer.index]
        cache[0, :, :, self.column] = k
        cache[1, :, :, self.column] = v
        keys, values = cache[:, :, :, : self.column + 1]
        # Heads that share keys are laid out as if they were several tokens, so that the keys are read once for all.
        grouped = q.unflatten(1, (layer.num_kv_heads, -1))
        return F.scaled_dot_product_attention(grouped, keys, values, scale=layer.scale).flatten(1, 2)


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
