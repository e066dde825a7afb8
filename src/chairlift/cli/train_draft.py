"""`chairlift train-draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train_draft(
    model: Annotated[str, typer.Argument(help="A known model's name, a folder, a .gguf file, or a hub id.")],
    output: Annotated[Path, typer.Option(help="A folder for the draft head; what is there already is gone on with.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="A text file with one question per line to ask the model.", show_default="many subjects"),
    ] = None,
    texts: Annotated[int, typer.Option(help="How many texts the model writes.")] = 65_536,
    length: Annotated[int, typer.Option(help="Of each text, in tokens, questions included.")] = 320,
    epochs: Annotated[int, typer.Option(help="How often each text is learned from.")] = 6,
    batch: Annotated[int, typer.Option(help="Texts that are learned from at a time.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="How far a batch may move the weights.")] = 1e-3,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that can be guessed: the most frequent ones.")] = 8192,
    minutes: Annotated[
        float, typer.Option(help="For all of it: there will be fewer texts or epochs if this is too short.")
    ] = 5.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0,
) -> None:
    """Train a draft head for --speculate draft:FOLDER on texts that the model writes itself.

    A few minutes on a GPU for a small model. Each tenth of the training is kept:
    a command that was interrupted goes on from there when it is given again.
    """
    from chairlift.errors import InvalidParameter
    from chairlift.lab.training.train_draft import TrainSettings
    from chairlift.lab.training.train_draft import train_draft as train
    from chairlift.terminal.console import show_log

    show_log(quiet=False)
    settings = TrainSettings(
        texts=texts,
        length=length,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        draft_vocab=draft_vocab,
        minutes=minutes,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    try:
        asked = [] if prompts is None else prompts.read_text().splitlines()
    except OSError as error:
        raise InvalidParameter("prompts", f"{prompts}: {error.strerror}") from None
    train(model, output, settings, [line.strip() for line in asked if line.strip()], typer.echo)
