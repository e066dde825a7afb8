"""`chairlift explain`: the visual guide, drawn from real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.progress import watch
from chairlift.terminal.console import show_log
from chairlift_lab.explain.guide import ALL, TOPICS, parse_formats, topic_named, write_guide
from chairlift_lab.report.options import require_matplotlib


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
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write to.")] = Path("guide"),
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model to run: a name, a .gguf file, a folder or a hub id.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        str,
        typer.Option(metavar="NAME[,NAME…]", help="Formats to write: png, svg, json (the run's data), md (a page)."),
    ] = "png,svg,json,md",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the names of the files.")] = False,
) -> None:
    """Draw how serving works, from runs of the engine: pictures, a page that explains them, and the data."""
    chosen = parse_formats(formats)
    if topic != ALL:
        topic_named(topic)
    require_matplotlib("topic")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter("out", f"cannot make the folder {str(out)!r} ({error.strerror})") from None
    show_log(quiet=True)
    from chairlift_lab.explain.recording import TopicEngines

    with watch(enabled=not quiet) as note:
        note(f"loading {model}")
        written = write_guide(topic, TopicEngines.load(model, progress=not quiet), out, chosen, note=note)
    for path in written:
        typer.echo(path)
