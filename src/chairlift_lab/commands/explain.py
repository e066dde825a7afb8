"""`chairlift explain`: the visual guide, drawn from real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import watch
from chairlift.terminal.console import show_log
from chairlift_lab.explain.registry import ALL, TOPICS, topics_named
from chairlift_lab.explain.sheet import require_matplotlib


@app.command(
    group=UNDERSTAND,
    examples=[
        "chairlift explain batching --out guide",
        "chairlift explain all --out guide",
        "chairlift explain masks --out pictures --formats svg",
    ],
)
def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help=f"{', '.join(TOPICS)}; or {ALL} for the whole guide.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path("guide"),
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model to run: a name, a .gguf file, a folder or a hub id.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        str, typer.Option(metavar="LIST", help="Formats to write: png, svg, html, json (the run's data), md.")
    ] = "png,svg,html,json",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the names of the files.")] = False,
) -> None:
    """Draw how serving works, from runs of the engine: pictures, a page that explains them, and the data."""
    from chairlift_lab.explain.write import make_folder, parse_formats, write_guide

    topics, chosen = topics_named(topic), parse_formats(formats)
    require_matplotlib()
    folder = make_folder(out)
    show_log(quiet=True)
    from chairlift_lab.explain.topic_engines import TopicEngines

    with watch(enabled=not quiet) as note:
        note(f"loading {model}")
        written = write_guide(topics, TopicEngines.load(model, progress=not quiet), folder, chosen, note=note)
    for path in written:
        typer.echo(path)
