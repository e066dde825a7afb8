"""`chairlift make-model`: a checkpoint of a public shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.errors import InvalidParameter


@app.command(
    "make-model",
    group=UNDERSTAND,
    examples=[
        "chairlift make-model tinyllama-1.1b --format q4_k_m --out tiny.gguf",
        "chairlift make-model ./config.json --format safetensors --out folder",
    ],
)
def make_model(
    shape: Annotated[str, typer.Argument(help="A shape by name (tinyllama-1.1b, llama3-8b, ...) or a config.json.")],
    format: Annotated[
        str,
        typer.Option(
            help="safetensors, or of a GGUF file: q4_0, q4_1, q5_0, q5_1, q8_0, q6_k, iq4_nl, iq4_xs, q4_k_m, q5_k_m."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE|FOLDER", help="What to write: with safetensors a folder.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Write a model of a public shape with random weights.

    For measurements without downloads: speed and memory depend on the shape and
    the format, not on what the weights say. A GGUF file has the tokenizer of the
    default model, so that any engine can serve it.
    """
    from chairlift.progress import watch
    from chairlift_lab.common.model_shapes import config_file, read_json_config
    from chairlift_lab.make_model import FORMATS, write_random_folder, write_random_gguf

    if format != "safetensors" and format not in FORMATS:
        raise InvalidParameter("format", f"unknown format {format!r}; choose from safetensors, {', '.join(FORMATS)}")
    if out.exists():
        raise InvalidParameter("out", f"{str(out)!r} exists already")
    with config_file(shape) as path:
        config = read_json_config(Path(path), "shape")
    with watch(enabled=not quiet) as note:
        if format == "safetensors":
            write_random_folder(config, out, note)
        else:
            write_random_gguf(config, format, out, note)
    size = sum(file.stat().st_size for file in out.iterdir()) if out.is_dir() else out.stat().st_size
    typer.echo(f"wrote {out} ({size / 1e9:.2f} GB)")
