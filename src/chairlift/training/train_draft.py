"""`chairlift train-draft`: a draft head for a model, trained on what the model itself writes.

Also runs by itself where the command line's libraries are missing:

    python -m chairlift.training.train_draft MODEL --output FOLDER
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from chairlift.core.sampling import MAX_SEED
from chairlift.errors import ChairliftError, InvalidParameter, UnsupportedModel
from chairlift.execution.config import EngineConfig
from chairlift.execution.startup import LoadedModel, load_model
from chairlift.models.decoder import Decoder
from chairlift.speculative.head import head_rows
from chairlift.speculative.head_config import HeadConfig
from chairlift.training.batches import Batch, split_batches
from chairlift.training.progress import Progress
from chairlift.training.texts import Report, Texts, write_texts
from chairlift.training.trainable_head import TrainableHead, WholeTexts

DEPTH = 3  # places that a head is trained to guess one after the other, each from its own state at the one before
DEPTH_WEIGHTS = (1.0, 0.7, 0.5)
STATE_WEIGHT = 0.5  # of being like the target's state, beside choosing like the target
TEXTS_VERSION = 2  # of what is written to disk


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    texts: int = 3000  # that the target writes
    length: int = 384  # of each, in tokens, the question included
    epochs: int = 8
    batch: int = 16  # texts at a time
    learning_rate: float = 1e-3
    draft_vocab: int = 8192  # the tokens that it can guess: those that come up most often
    minutes: float | None = None  # stop training after so long, with what there is
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
        if self.minutes is not None and self.minutes <= 0:
            raise InvalidParameter("minutes", f"must be above 0, got {self.minutes}")
        if not 0 <= self.seed <= MAX_SEED - self.texts:
            raise InvalidParameter("seed", f"must be at least 0, got {self.seed}")

    def fingerprint(self, model: str) -> str:
        """What must be the same for a checkpoint to be gone on with."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("minutes", "device", "epochs")}
        return json.dumps({"model": Path(model).name, "texts_version": TEXTS_VERSION} | kept, sort_keys=True)


def train_draft(model: str, output: Path, settings: TrainSettings, prompts: Sequence[str], say: Report) -> Path:
    """Write texts, train on them, and save what `speculate="draft:OUTPUT"` loads. What was done before under the same
    settings is not done again."""
    begun = time.monotonic()
    config = EngineConfig(device=settings.device, dtype=settings.dtype)
    loaded = load_model(model, config)
    target = loaded.model
    if not isinstance(target, Decoder):
        raise UnsupportedModel("a draft head needs a model that runs on our own decoder, not on transformers")
    output.mkdir(parents=True, exist_ok=True)
    progress = Progress.open(output, settings.fingerprint(model))
    texts = _texts(loaded, config, output, settings, prompts, progress, say)
    say(f"texts      {len(texts):,} of {int(texts.lengths.sum()):,} tokens, {time.monotonic() - begun:.0f} s")
    _Training(target, texts, settings, progress, say).run()
    size = sum(file.stat().st_size for file in (output / "model.safetensors", output / "config.json"))
    say(f"saved      {output}, {size / 1e6:.1f} MB, after {time.monotonic() - begun:.0f} s")
    return output


def _texts(
    loaded: LoadedModel,
    config: EngineConfig,
    output: Path,
    settings: TrainSettings,
    prompts: Sequence[str],
    progress: Progress,
    say: Report,
) -> Texts:
    file = output / "texts.safetensors"
    if progress.resumed and file.exists():
        return Texts.load(file)
    length = min(settings.length, loaded.model.max_len)
    short = replace(config, max_model_len=length)  # no room is needed for longer ones
    texts = write_texts(loaded, short, settings.texts, length, settings.seed, prompts, say)
    gc.collect()  # the engine is gone, and its memory is wanted
    texts.save(file)
    return texts


class _Training:
    def __init__(self, target: Decoder, texts: Texts, settings: TrainSettings, progress: Progress, say: Report) -> None:
        self.target = target
        self.settings = settings
        self.progress = progress
        self.say = say
        counts = torch.bincount(texts.tokens.long(), minlength=target.vocab_size)
        size = min(settings.draft_vocab, target.vocab_size)
        self.token_ids = counts.argsort(descending=True, stable=True)[:size].sort().values.to(target.device)
        self.config = _head_config(target, size)
        torch.manual_seed(settings.seed)
        self.head = TrainableHead(self.config, target).to(target.device)
        self.rows = _copied(head_rows(target, self.token_ids)).float()  # [draft vocab, hidden]
        self.batches, self.held_out = split_batches(texts, settings.batch)

    def run(self) -> None:
        settings, parameters = self.settings, list(self.head.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.progress.restore(self.head, optimizer)
        total = settings.epochs * len(self.batches)
        begun = time.monotonic()
        for epoch in range(self.progress.epochs_done, settings.epochs):
            order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(epoch)).tolist()
            losses = []
            for index, chosen in enumerate(order):
                rate = settings.learning_rate * _schedule((epoch * len(order) + index) / total)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss, _ = self._loss(self.batches[chosen])
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                losses.append(loss.detach())
            self.progress.save(self.head, optimizer, epoch + 1)
            self._save()
            mean = torch.stack(losses).mean().item()
            seconds = time.monotonic() - begun
            self.say(f"epoch {epoch + 1:>3}  loss {mean:.3f}, {self._describe_held_out()}, {seconds:.0f} s")
            if settings.minutes is not None and seconds > 60 * settings.minutes:
                self.say("stopped    the time is over")
                return
        if self.progress.epochs_done >= settings.epochs:
            self._save()

    def _loss(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Also: at which places of the answers each guess was the target's own."""
        device = self.target.device
        counted = batch.answered[:, 1:].to(device)  # the first token has no state before it
        tokens = batch.tokens.to(device).clamp(min=0)
        with torch.no_grad():
            hidden, embedded = self._target_states(tokens)
            goal = F.linear(hidden, self.rows).softmax(dim=-1)  # among the tokens that it can guess
            best = self._target_choice(hidden)
        previous, losses, right = hidden, [], []
        for depth in range(DEPTH):
            shifted = F.pad(previous[:, :-1], (0, 0, 1, 0))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                states = self.head(embedded, shifted).float()
                scores = F.linear(states, self.rows)
            choice = -(goal * scores.float().log_softmax(dim=-1)).sum(dim=-1)[:, 1:]
            likeness = F.smooth_l1_loss(states, hidden, reduction="none").mean(dim=-1)[:, 1:]
            losses.append(DEPTH_WEIGHTS[depth] * (choice + STATE_WEIGHT * likeness)[counted].mean())
            with torch.no_grad():
                right.append((self.token_ids[scores.argmax(dim=-1)] == best)[:, 1:][counted])
            previous = states.detach()
        return torch.stack(losses).sum(), right

    def _target_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        texts, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(texts)
        hidden = self.target.hidden_states(tokens.flatten(), positions, WholeTexts(length))
        embedded = self.target.embed(tokens.flatten())
        return _copied(hidden).float().view(texts, length, -1), _copied(embedded).float().view(texts, length, -1)

    def _target_choice(self, hidden: Tensor) -> Tensor:
        """What the target would say next, of all its tokens."""
        rows = hidden.flatten(0, 1).to(self.target.dtype)
        found = [self.target.logits(part).argmax(dim=-1) for part in rows.split(2048)]
        return torch.cat(found).view(hidden.shape[:2])

    @torch.no_grad()
    def _describe_held_out(self) -> str:
        found = [self._loss(batch)[1] for batch in self.held_out]
        shares = [torch.cat([right[depth] for right in found]).float().mean().item() for depth in range(DEPTH)]
        return "right " + ", ".join(f"{share:.0%}" for share in shares)

    def _save(self) -> None:
        half = {name: tensor.half().cpu().contiguous() for name, tensor in self.head.tensors().items()}
        file = self.progress.folder / "model.safetensors"
        save_file(half | {"token_ids": self.token_ids.int().cpu()}, file, metadata={"format": "pt"})
        (self.progress.folder / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")


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
    )


def _schedule(progress: float) -> float:
    """A short warm-up, then a cosine down to a twentieth."""
    return min(1.0, progress / 0.05 + 0.01) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def _copied(tensor: Tensor) -> Tensor:
    """The model was loaded for inference only; copies of what comes out of it may be trained on."""
    with torch.inference_mode(False):
        return tensor.clone()


def main() -> None:
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(prog="chairlift train-draft", description="Train a draft head for a model.")
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="a text file with one question per line")
    for name in ("texts", "length", "epochs", "batch", "draft_vocab", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--minutes", type=float)
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
