"""`chairlift train-draft`: trains a draft head on texts that its target model writes."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from chairlift.config import EngineConfig
from chairlift.engine.startup import load_model
from chairlift.errors import UnsupportedModel
from chairlift.models.decoder import Decoder
from chairlift.speculation.head_layers import HeadConfig
from chairlift_lab.commands.train_draft import TrainSettings
from chairlift_lab.training.texts import LineReport, TrainingTexts, refuse_unusual_attention, write_texts
from chairlift_lab.training.trainable_head import DraftObjective, TrainableHead, evaluate

# Not cuDNN, which compiles a plan for every length: growing texts have a new one in every step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WRITING_SHARE = 0.4  # share of the time for writing; the rest is for training
REPORTS = 10  # each with a checkpoint
MAX_HELD_OUT = 512  # texts to evaluate with
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0


def train_draft(model: str, output: Path, settings: TrainSettings, prompts: Sequence[str], report: LineReport) -> Path:
    """Write texts, train on them, and save what `speculate="draft:OUTPUT"` loads. With the same settings, an
    interrupted training resumes: texts are not written again, and training continues from the last checkpoint."""
    start = time.monotonic()
    loaded = load_model(model, EngineConfig(device=settings.device, dtype=settings.dtype))
    target = loaded.model
    if not isinstance(target, Decoder):
        raise UnsupportedModel("a draft head needs a model that runs on our own decoder, not on transformers")
    refuse_unusual_attention(target.attention_layers)
    if target.recurrent_layers:
        raise UnsupportedModel("a draft head cannot be trained for models with recurrent layers")
    output.mkdir(parents=True, exist_ok=True)
    progress = TrainingProgress(output, settings.fingerprint(model, prompts))
    seconds = 60 * settings.minutes
    with sdpa_kernel(ATTENTION):
        file = output / "texts.safetensors"
        if progress.resumed and file.exists():
            texts = TrainingTexts.load(file)
        else:
            length, limit = min(settings.length, target.max_len), WRITING_SHARE * seconds
            texts = write_texts(loaded, target, settings.texts, length, settings.seed, prompts, report, limit)
            gc.collect()  # frees the KV cache before training
            texts.save(file)
        spent = time.monotonic() - start
        report(f"texts      {len(texts):,} of {texts.tokens.numel():,} tokens, {spent:.0f} s")
        _Training(target, texts, settings, progress, report).run(max(1.0, seconds - spent))
    size = sum(file.stat().st_size for file in (output / "model.safetensors", output / "config.json"))
    report(f"saved      {output}, {size / 1e6:.1f} MB, after {time.monotonic() - start:.0f} s")
    return output


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
        start, reported, losses = time.monotonic(), first / total, []
        for step in range(first, total):
            spent = (time.monotonic() - start) / seconds
            done = max(step / total, first / total + (1 - first / total) * spent)
            if done >= 1:
                self._report("stopped    the time is over")
                break
            result = self._objective.evaluate(self._head, self._texts[self._batch(step, per_epoch)])
            optimizer.step(result.loss, done)
            losses.append(result.loss.detach())
            done = max(done, (step + 1) / total)
            if done - reported >= 1 / REPORTS or step + 1 == total:
                self._evaluate(f"step {step + 1:,} of {total:,}, {time.monotonic() - start:.0f} s", losses)
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
        accuracy = evaluate([(self._objective.evaluate(self._head, texts).hits, texts.written) for texts in held_out])
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


class HeadOptimizer:
    """Muon for the matrices, which needs fewer steps than Adam; Adam for the rest."""

    def __init__(self, head: nn.Module, learning_rate: float) -> None:
        self._head = head
        self._learning_rate = learning_rate
        parameters = list(head.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            # Scale steps like Adam's, so that one learning rate fits both.
            torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, loss: Tensor, done: float) -> None:
        """`done`: the share of the training that is done, from 0 to 1."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * schedule(done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, for a checkpoint."""
        kept = ((name, state[parameter]) for name, parameter, state in self._states() if parameter in state)
        return {f"{name}/{key}": torch.as_tensor(value) for name, values in kept for key, value in values.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter, state in self._states():
            own = {path.partition("/")[2]: value for path, value in tensors.items() if path.startswith(f"{name}/")}
            # Adam keeps its step count on the CPU.
            state[parameter] = {key: value if key == "step" else value.to(parameter) for key, value in own.items()}

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[nn.Parameter, dict[str, Tensor]]]]:
        for name, parameter in self._head.named_parameters():
            yield name, parameter, self._optimizers[0 if parameter.ndim == 2 else 1].state  # type: ignore[misc]


def schedule(done: float) -> float:
    """The factor of the learning rate: a short warm-up, then a cosine down to 0.01."""
    return min(1.0, done / 0.05 + 0.01) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


class TrainingProgress:
    """`progress.json`, the texts, and checkpoints of the weights and the optimizer."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        file = folder / "progress.json"
        saved = json.loads(file.read_text()) if file.exists() else {}
        self.resumed = saved.get("settings") == fingerprint
        if not self.resumed:  # files of other settings must not be resumed from
            for name in ("texts.safetensors", "checkpoint.safetensors"):
                (folder / name).unlink(missing_ok=True)
        self.steps_done: int = saved.get("steps_done", 0) if self.resumed else 0
        self._write()

    def _write(self) -> None:
        progress = {"settings": self._fingerprint, "steps_done": self.steps_done}
        (self.folder / "progress.json").write_text(json.dumps(progress))

    def restore(self, head: TrainableHead, optimizer: HeadOptimizer) -> None:
        if not self.steps_done:
            return
        saved = load_file(self.folder / "checkpoint.safetensors")
        for name, parameter in head.named_parameters():
            parameter.data.copy_(saved[name])
        optimizer.restore(saved)

    def save(self, head: TrainableHead, optimizer: HeadOptimizer, steps_done: int) -> None:
        tensors = {name: parameter.data for name, parameter in head.named_parameters()} | optimizer.tensors()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / "checkpoint.new")
        (self.folder / "checkpoint.new").replace(self.folder / "checkpoint.safetensors")
        self.steps_done = steps_done
        self._write()
