"""`chairlift train-draft`: a draft head for a model, trained on what the model itself writes.

Also runs by itself where the command line's libraries are missing:

    python -m chairlift.lab.training.train_draft MODEL --output FOLDER
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from chairlift.config import EngineConfig
from chairlift.core.sampling.params import MAX_SEED
from chairlift.engine.startup import LoadedModel, load_model
from chairlift.errors import ChairliftError, InvalidParameter, UnsupportedModel
from chairlift.lab.training.judging import judge
from chairlift.lab.training.learning import Lesson
from chairlift.lab.training.optimizer import HeadOptimizer
from chairlift.lab.training.progress import Progress
from chairlift.lab.training.texts import Report, Texts, write_texts
from chairlift.lab.training.trainable_head import TrainableHead
from chairlift.lab.training.writer import refuse_unusual_attention
from chairlift.models.decoder import Decoder
from chairlift.speculation.head_config import HeadConfig

# Not cuDNN's, which prepares itself for every length anew: texts that grow have a new one in every step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TEXTS_VERSION = 4  # of what is written to disk
WRITING_SHARE = 0.4  # of the minutes given; the rest is for learning
REPORTS = 10  # with a checkpoint each, from beginning to end
MOST_HELD_OUT = 512  # texts to judge by


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    texts: int = 262_144  # that the target writes
    length: int = 192  # of each, in tokens, questions included
    epochs: int = 6
    batch: int = 128  # texts at a time
    learning_rate: float = 3e-3
    draft_vocab: int = 8192  # the tokens that it can guess: those that come up most often
    minutes: float = 8.0  # for all of it: fewer texts, or fewer epochs, if there is no time for more
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "length", "epochs", "batch", "draft_vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (8 if name == "length" else 1):
                raise InvalidParameter(name, f"must be a positive integer, got {value!r}")
        if not (0 < self.learning_rate < 1):
            raise InvalidParameter("learning_rate", f"must be above 0 and below 1, got {self.learning_rate}")
        if not 0 < self.minutes < math.inf:
            raise InvalidParameter("minutes", f"must be above 0, got {self.minutes}")
        if not 0 <= self.seed <= MAX_SEED - self.texts:
            raise InvalidParameter("seed", f"must be from 0 to {MAX_SEED - self.texts}, got {self.seed}")

    def fingerprint(self, model: str, prompts: Sequence[str]) -> str:
        """What must be the same for a checkpoint to be gone on with."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("minutes", "device", "epochs")}
        asked = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
        about = {"model": Path(model).name, "texts_version": TEXTS_VERSION, "prompts": asked}
        return json.dumps(about | kept, sort_keys=True)


def train_draft(model: str, output: Path, settings: TrainSettings, prompts: Sequence[str], say: Report) -> Path:
    """Write texts, train on them, and save what `speculate="draft:OUTPUT"` loads. What was done before under the same
    settings is not done again: texts are not written twice, and a head that ran out of time is trained on."""
    begun = time.monotonic()
    loaded = load_model(model, EngineConfig(device=settings.device, dtype=settings.dtype))
    target = loaded.model
    if not isinstance(target, Decoder):
        raise UnsupportedModel("a draft head needs a model that runs on our own decoder, not on transformers")
    refuse_unusual_attention(target.attention_layers)
    output.mkdir(parents=True, exist_ok=True)
    progress = Progress.open(output, settings.fingerprint(model, prompts))
    seconds = 60 * settings.minutes
    with sdpa_kernel(ATTENTION):
        texts = _texts(loaded, target, output, settings, prompts, progress, say, WRITING_SHARE * seconds)
        spent = time.monotonic() - begun
        say(f"texts      {len(texts):,} of {texts.tokens.numel():,} tokens, {spent:.0f} s")
        _Training(target, texts, settings, progress, say).run(max(1.0, seconds - spent))
    size = sum(file.stat().st_size for file in (output / "model.safetensors", output / "config.json"))
    say(f"saved      {output}, {size / 1e6:.1f} MB, after {time.monotonic() - begun:.0f} s")
    return output


def _texts(
    loaded: LoadedModel,
    target: Decoder,
    output: Path,
    settings: TrainSettings,
    prompts: Sequence[str],
    progress: Progress,
    say: Report,
    seconds: float,
) -> Texts:
    file = output / "texts.safetensors"
    if progress.resumed and file.exists():
        return Texts.load(file)
    length = min(settings.length, target.max_len)
    texts = write_texts(loaded, target, settings.texts, length, settings.seed, prompts, say, seconds)
    gc.collect()  # the keys and values are gone, and their memory is wanted
    texts.save(file)
    return texts


class _Training:
    def __init__(self, target: Decoder, texts: Texts, settings: TrainSettings, progress: Progress, say: Report) -> None:
        self._settings = settings
        self._progress = progress
        self._say = say
        counts = torch.bincount(texts.tokens[texts.written].long(), minlength=target.vocab_size)
        size = min(settings.draft_vocab, target.vocab_size)
        token_ids = counts.argsort(descending=True, stable=True)[:size]  # the most frequent ones first
        say(f"guesses    among {size:,} tokens, {counts[token_ids].sum() / counts.sum():.1%} of what is written")
        self._token_ids = token_ids.to(target.device)
        self._config = _head_config(target, size)
        target.tap(self._config.taps)
        torch.manual_seed(settings.seed)
        self._head = TrainableHead(self._config, target).to(target.device)
        self._lesson = Lesson(target, self._token_ids)
        held_out = texts.held_out.nonzero()[:MOST_HELD_OUT, 0]
        trained_on = (~texts.held_out).nonzero()[:, 0]
        self._order: tuple[int, Tensor] | None = None  # an epoch and its order
        self._held_out = texts[held_out]
        # A handful of texts is only good for trying things out.
        self._texts = texts[trained_on] if len(trained_on) else self._held_out

    def run(self, seconds: float) -> None:
        """All epochs, or as much as there is time for: the learning rate goes down in the time that there is."""
        settings = self._settings
        optimizer = HeadOptimizer(self._head, settings.learning_rate)
        self._progress.restore(self._head, optimizer)
        per_epoch = math.ceil(len(self._texts) / settings.batch)
        total, first = per_epoch * settings.epochs, self._progress.steps_done
        begun, reported, losses = time.monotonic(), first / total, []
        for step in range(first, total):
            spent = (time.monotonic() - begun) / seconds
            done = max(step / total, first / total + (1 - first / total) * spent)
            if done >= 1:
                self._say("stopped    the time is over")
                break
            outcome = self._lesson.study(self._head, self._texts[self._batch(step, per_epoch)])
            optimizer.step(outcome.loss, done)
            losses.append(outcome.loss.detach())
            done = max(done, (step + 1) / total)
            if done - reported >= 1 / REPORTS or step + 1 == total:
                self._report(f"step {step + 1:,} of {total:,}, {time.monotonic() - begun:.0f} s", losses)
                self._keep(optimizer, step + 1)
                reported, losses = done, []
        self._keep(None, total)
        if losses:
            self._report("in the end", losses)

    def _batch(self, step: int, per_epoch: int) -> Tensor:
        """Which texts: every one once in an epoch."""
        epoch, index = divmod(step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            chance = torch.Generator().manual_seed(epoch)
            self._order = epoch, torch.randperm(len(self._texts), generator=chance)
        size = self._settings.batch
        return self._order[1][index * size : (index + 1) * size]

    @torch.no_grad()
    def _report(self, where: str, losses: list[Tensor]) -> None:
        size = self._settings.batch
        parts = torch.arange(len(self._held_out)).split(size)
        held_out = [self._held_out[part] for part in parts]
        verdict = judge([(self._lesson.study(self._head, some).hits, some.written) for some in held_out])
        self._say(f"learning   {where}: loss {torch.stack(losses).mean().item():.3f}, {verdict}")

    def _keep(self, optimizer: HeadOptimizer | None, steps_done: int) -> None:
        if optimizer is not None:
            self._progress.save(self._head, optimizer, steps_done)
        half = {name: tensor.half().cpu().contiguous() for name, tensor in self._head.tensors().items()}
        file = self._progress.folder / "model.safetensors"
        save_file(half | {"token_ids": self._token_ids.int().cpu()}, file, metadata={"format": "pt"})
        (self._progress.folder / "config.json").write_text(json.dumps(self._config.to_json(), indent=2) + "\n")


def _head_config(target: Decoder, draft_vocab: int) -> HeadConfig:
    first = target.config.layers[0]
    attention = first.attention
    head_dim = attention.head_dim
    # The speed of the second pair tells theta: theta ** (-2 / head_dim).
    theta = 10_000.0
    if first.rope is not None and len(first.rope.inv_freq) > 1:
        theta = float(round(first.rope.inv_freq[1] ** (-head_dim / 2)))
    return HeadConfig(
        hidden_size=target.config.hidden_size,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        intermediate_size=first.intermediate_size,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        max_position_embeddings=target.max_len,
        taps=tuple(sorted({len(target.layers) // 3, 2 * len(target.layers) // 3} - {0})),
    )


def main() -> None:
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(prog="chairlift train-draft", description="Train a draft head for a model.")
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="a text file with one question per line")
    for name in ("texts", "length", "epochs", "batch", "draft_vocab", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("learning_rate", "minutes"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = vars(parser.parse_args())
    model, output, file = given.pop("model"), given.pop("output"), given.pop("prompts")
    try:
        prompts = [line.strip() for line in file.read_text().splitlines() if line.strip()] if file else []
        train_draft(model, output, TrainSettings(**given), prompts, lambda line: print(line, flush=True))
    except (ChairliftError, OSError) as error:
        raise SystemExit(f"train-draft: {error}") from None


if __name__ == "__main__":
    main()
