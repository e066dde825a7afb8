"""`chairlift train-draft`: trains a draft head on texts that its target model writes.

Also runs without the command line's libraries:

    python -m chairlift_lab.training.train_draft MODEL --output FOLDER
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
from chairlift.models.decoder import Decoder
from chairlift.options.config_file import read_text
from chairlift.speculation.head_layers import HeadConfig
from chairlift_lab.training.objective import DraftObjective, evaluate
from chairlift_lab.training.optimizer import HeadOptimizer, TrainingProgress
from chairlift_lab.training.texts import LineReport, TrainingTexts, refuse_unusual_attention, write_texts
from chairlift_lab.training.trainable_head import TrainableHead

# Not cuDNN, which compiles a plan for every length: growing texts have a new one in every step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
TEXTS_VERSION = 4  # version of texts.safetensors
WRITING_SHARE = 0.4  # share of the time for writing; the rest is for training
REPORTS = 10  # each with a checkpoint
MAX_HELD_OUT = 512  # texts to evaluate with


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    texts: int = 262_144  # written by the target
    length: int = 192  # tokens of each, questions included
    epochs: int = 6
    batch: int = 128  # texts per training step
    learning_rate: float = 3e-3
    draft_vocab: int = 8192  # tokens that can be drafted: the most frequent ones
    minutes: float = 8.0  # the time of all; a short one means fewer texts or epochs
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
        """What must be the same for a checkpoint to be resumed."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("minutes", "device", "epochs")}
        prompts_hash = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
        about = {"model": Path(model).name, "texts_version": TEXTS_VERSION, "prompts": prompts_hash}
        return json.dumps(about | kept, sort_keys=True)


def train_draft(model: str, output: Path, settings: TrainSettings, prompts: Sequence[str], report: LineReport) -> Path:
    """Write texts, train on them, and save what `speculate="draft:OUTPUT"` loads. With the same settings, an
    interrupted training resumes: texts are not written again, and training continues from the last checkpoint."""
    begun = time.monotonic()
    loaded = load_model(model, EngineConfig(device=settings.device, dtype=settings.dtype))
    target = loaded.model
    if not isinstance(target, Decoder):
        raise UnsupportedModel("a draft head needs a model that runs on our own decoder, not on transformers")
    refuse_unusual_attention(target.attention_layers)
    if target.recurrent_layers:
        raise UnsupportedModel("a draft head cannot be trained for models with recurrent layers")
    output.mkdir(parents=True, exist_ok=True)
    progress = TrainingProgress.open(output, settings.fingerprint(model, prompts))
    seconds = 60 * settings.minutes
    with sdpa_kernel(ATTENTION):
        texts = _texts(loaded, target, output, settings, prompts, progress, report, WRITING_SHARE * seconds)
        spent = time.monotonic() - begun
        report(f"texts      {len(texts):,} of {texts.tokens.numel():,} tokens, {spent:.0f} s")
        _Training(target, texts, settings, progress, report).run(max(1.0, seconds - spent))
    size = sum(file.stat().st_size for file in (output / "model.safetensors", output / "config.json"))
    report(f"saved      {output}, {size / 1e6:.1f} MB, after {time.monotonic() - begun:.0f} s")
    return output


def _texts(
    loaded: LoadedModel,
    target: Decoder,
    output: Path,
    settings: TrainSettings,
    prompts: Sequence[str],
    progress: TrainingProgress,
    report: LineReport,
    seconds: float,
) -> TrainingTexts:
    file = output / "texts.safetensors"
    if progress.resumed and file.exists():
        return TrainingTexts.load(file)
    length = min(settings.length, target.max_len)
    texts = write_texts(loaded, target, settings.texts, length, settings.seed, prompts, report, seconds)
    gc.collect()  # frees the KV cache before training
    texts.save(file)
    return texts


class _Training:
    def __init__(
        self,
        target: Decoder,
        texts: TrainingTexts,
        settings: TrainSettings,
        progress: TrainingProgress,
        report: LineReport,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._report = report
        counts = torch.bincount(texts.tokens[texts.written].long(), minlength=target.vocab_size)
        size = min(settings.draft_vocab, target.vocab_size)
        token_ids = counts.argsort(descending=True, stable=True)[:size]  # most frequent first
        report(f"drafts     among {size:,} tokens, {counts[token_ids].sum() / counts.sum():.1%} of what is written")
        self._token_ids = token_ids.to(target.device)
        self._config = _head_config(target, size)
        target.tap(self._config.taps)
        torch.manual_seed(settings.seed)
        self._head = TrainableHead(self._config, target).to(target.device)
        self._objective = DraftObjective(target, self._token_ids)
        held_out = texts.held_out.nonzero()[:MAX_HELD_OUT, 0]
        trained_on = (~texts.held_out).nonzero()[:, 0]
        self._order: tuple[int, Tensor] | None = None  # an epoch and its order
        self._held_out = texts[held_out]
        # Very few texts, as in a test, may all be held out.
        self._texts = texts[trained_on] if len(trained_on) else self._held_out

    def run(self, seconds: float) -> None:
        """Train for all epochs or until `seconds` are over; the learning rate decays accordingly."""
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
                self._report("stopped    the time is over")
                break
            result = self._objective.evaluate(self._head, self._texts[self._batch(step, per_epoch)])
            optimizer.step(result.loss, done)
            losses.append(result.loss.detach())
            done = max(done, (step + 1) / total)
            if done - reported >= 1 / REPORTS or step + 1 == total:
                self._evaluate(f"step {step + 1:,} of {total:,}, {time.monotonic() - begun:.0f} s", losses)
                self._save(optimizer, step + 1)
                reported, losses = done, []
        self._save(None, total)
        if losses:
            self._evaluate("in the end", losses)

    def _batch(self, step: int, per_epoch: int) -> Tensor:
        """The texts of a step; an epoch has each text once."""
        epoch, index = divmod(step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._order = epoch, torch.randperm(len(self._texts), generator=generator)
        size = self._settings.batch
        return self._order[1][index * size : (index + 1) * size]

    @torch.no_grad()
    def _evaluate(self, where: str, losses: list[Tensor]) -> None:
        size = self._settings.batch
        parts = torch.arange(len(self._held_out)).split(size)
        held_out = [self._held_out[part] for part in parts]
        accuracy = evaluate([(self._objective.evaluate(self._head, some).hits, some.written) for some in held_out])
        self._report(f"learning   {where}: loss {torch.stack(losses).mean().item():.3f}, {accuracy}")

    def _save(self, optimizer: HeadOptimizer | None, steps_done: int) -> None:
        if optimizer is not None:
            self._progress.save(self._head, optimizer, steps_done)
        half = {name: tensor.half().cpu().contiguous() for name, tensor in self._head.tensors().items()}
        file = self._progress.folder / "model.safetensors"
        save_file(half | {"token_ids": self._token_ids.int().cpu()}, file, metadata={"format": "pt"})
        (self._progress.folder / "config.json").write_text(json.dumps(self._config.to_json(), indent=2) + "\n")


def _head_config(target: Decoder, draft_vocab: int) -> HeadConfig:
    first = target.config.layers[0]
    attention = first.only_attention
    head_dim = attention.head_dim
    # The second frequency is theta ** (-2 / head_dim).
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
    parser = argparse.ArgumentParser(prog="chairlift train-draft", description="Train a draft head for a model.")
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="a text file with one question per line")
    for name, default in asdict(TrainSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    model, output, file = given.pop("model"), given.pop("output"), given.pop("prompts")
    try:
        questions = read_text(file, "prompts").splitlines() if file else []
        prompts = [line.strip() for line in questions if line.strip()]
        train_draft(model, output, TrainSettings(**given), prompts, lambda line: print(line, flush=True))
    except (ChairliftError, OSError) as error:
        raise SystemExit(f"train-draft: {error}") from None


if __name__ == "__main__":
    main()
