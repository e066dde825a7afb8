"""`chairlift train-draft`: train a draft head for speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.options import read_text
from chairlift_lab.training.settings import TrainSettings


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

    show_log(quiet=False)
    questions = [] if prompts is None else read_text(prompts, "prompts").splitlines()
    train(model, output, settings, [line.strip() for line in questions if line.strip()], typer.echo)
