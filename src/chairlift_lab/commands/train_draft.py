"""`chairlift train-draft`: train a draft head for speculative decoding; and its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.core.sampling.params import MAX_SEED
from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least, read_text
from chairlift_lab.report.options import Count, Settings

TEXTS_VERSION = 4  # version of texts.safetensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(Settings):
    texts: Annotated[Count, typer.Option(help="Number of texts that the model writes.")] = 65_536
    length: Annotated[int, at_least(8), typer.Option(help="Tokens of each text, questions included.")] = 320
    epochs: Annotated[Count, typer.Option(help="Passes over all texts.")] = 6
    batch: Annotated[Count, typer.Option(help="Texts per training step.")] = 64
    learning_rate: Annotated[float, above(0), typer.Option(help="Peak learning rate.")] = 1e-3
    draft_vocab: Annotated[Count, typer.Option(help="Tokens that can be drafted: the most frequent ones.")] = 8192
    minutes: Annotated[
        float, above(0), typer.Option(help="Time limit; if it is too short, there are fewer texts or epochs.")
    ] = 5.0
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, typer.Option(help="Type of the model: auto, float32, bfloat16 or float16.")] = "auto"
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not self.learning_rate < 1:
            raise InvalidParameter("learning_rate", f"must be above 0 and below 1, got {self.learning_rate}")
        if not 0 <= self.seed <= MAX_SEED - self.texts:
            raise InvalidParameter("seed", f"must be from 0 to {MAX_SEED - self.texts}, got {self.seed}")

    def fingerprint(self, model: str, prompts: Sequence[str]) -> str:
        """What must be the same for a checkpoint to be resumed."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("minutes", "device", "epochs")}
        prompts_hash = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
        about = {"model": Path(model).name, "texts_version": TEXTS_VERSION, "prompts": prompts_hash}
        return json.dumps(about | kept, sort_keys=True)


@app.command(
    "train-draft",
    group=UNDERSTAND,
    examples=[
        "chairlift train-draft smollm2-135m --output drafts/smollm2",
        "chairlift train-draft Qwen/Qwen3-0.6B --output drafts/qwen --prompts questions.txt --texts 5000",
        "chairlift serve Qwen/Qwen3-0.6B --speculate draft:drafts/qwen",
    ],
)
def train_draft(
    model: Annotated[str, typer.Argument(help="A known model's name, a folder, a .gguf file, or a hub id.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft head, or with an interrupted training.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one question for the model per line.", show_default="many subjects"),
    ] = None,
    *,
    settings: TrainSettings,
) -> None:
    """Train a draft head for --speculate draft:FOLDER on texts that the model writes itself.

    Takes a few minutes on a GPU for a small model. Each tenth of the training
    is saved: repeating an interrupted command continues from there.
    """
    from chairlift.terminal.console import show_log
    from chairlift_lab.training.train_draft import train_draft as train

    show_log(quiet=False, verbose=True)
    questions = [] if prompts is None else read_text(prompts, "prompts").splitlines()
    train(model, output, settings, [line.strip() for line in questions if line.strip()], typer.echo)
