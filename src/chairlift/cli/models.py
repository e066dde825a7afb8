"""`chairlift models`: the models, families and file formats that can be run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chairlift.cli.app import RUN, app
from chairlift.loading.known_models import DEFAULT_MODEL, KnownModel, known_models

FORMATS = {
    "safetensors": "a folder with config.json, tokenizer.json and .safetensors files, one or many; also quantized by "
    "compressed-tensors, AWQ, GPTQ, bitsandbytes or to fp8",
    "gguf": "one .gguf file, in any of its quantizations; tokenizer and chat template come from the file",
    "hub": "a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, fetched when it is reachable",
}


@app.command(group=RUN, examples=["chairlift models", "chairlift models --json"])
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models known by name, the families and the file formats that can be run."""
    from chairlift.models import supported_families

    if as_json:
        found = [_describe(model) for model in known_models()]
        typer.echo(json.dumps({"models": found, "families": supported_families(), "formats": FORMATS}, indent=2))
        return
    console = Console()
    console.print(_table(known_models()))
    console.print("\n[bold]Families[/bold]  " + ", ".join(supported_families()))
    console.print("Other causal language models of transformers run through a fallback.\n")
    console.print("[bold]Formats[/bold] for --model")
    for name, meaning in FORMATS.items():
        console.print(f"  {name:<12} {meaning}")


def _describe(model: KnownModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "default": model.name == DEFAULT_MODEL,
        "description": model.description,
        "licence": model.licence,
        "size_bytes": model.size,
        "cached": model.cached,
    }


def _table(known: list[KnownModel]) -> Table:
    table = Table("Name", "Description", "Licence", "Size", "Here", title="Known models", title_justify="left")
    for model in known:
        name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
        size = f"{model.size / 1e6:.0f} MB"
        table.add_row(name, model.description, model.licence, size, "yes" if model.cached else "fetched on first use")
    return table
