"""`chairlift models`: the models, families and file formats that can be run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chairlift.cli.app import RUN, app
from chairlift.loading.known_models import DEFAULT_MODEL, KnownModel, known_models
from chairlift.options import format_bytes

if TYPE_CHECKING:
    from chairlift.engine.model_check import ModelCheck

FORMATS = {
    "safetensors": "a folder with config.json, tokenizer.json and .safetensors files, one or many; also quantized by "
    "compressed-tensors, AWQ, GPTQ, bitsandbytes or to fp8",
    "gguf": "one .gguf file, in any of its quantizations; tokenizer and chat template come from the file",
    "hub": "a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, fetched when it is reachable",
}


@app.command(
    group=RUN,
    examples=[
        "chairlift models",
        "chairlift models --check Qwen/Qwen3-8B",
        "chairlift models --check path/to/config.json --json",
    ],
)
def models(
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="MODEL",
            help="Say whether this model runs, how, and how much memory it needs, without loading weights: a folder, "
            "a config.json, a GGUF file or a Hugging Face id. The exit status is 1 if it cannot run.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models known by name, the families and the file formats that can be run; or check one model."""
    if check is not None:
        _check(check, as_json=as_json)
        return
    from chairlift.models import supported_families

    if as_json:
        entries = [_describe(model) for model in known_models()]
        typer.echo(json.dumps({"models": entries, "families": supported_families(), "formats": FORMATS}, indent=2))
        return
    console = Console()
    console.print(_table(known_models()))
    console.print("\n[bold]Families[/bold]  " + ", ".join(supported_families()))
    console.print("Other causal language models of transformers run through a fallback.\n")
    console.print("[bold]Formats[/bold] for --model")
    for name, meaning in FORMATS.items():
        console.print(f"  {name:<12} {meaning}")


def _check(name: str, *, as_json: bool) -> None:
    from chairlift.engine.model_check import REFUSED, check_model

    checked = check_model(name)
    if as_json:
        typer.echo(json.dumps(asdict(checked), indent=2))
    else:
        grid = Table.grid("key", "value", padding=(0, 2))
        for key, value in _check_rows(checked):
            grid.add_row(key, value)
        Console(highlight=False).print(grid)
    if checked.path == REFUSED:
        raise typer.Exit(1)


def _check_rows(checked: ModelCheck) -> Iterator[tuple[str, str]]:
    from chairlift.engine.model_check import FALLBACK, REFUSED

    yield "model", f"{checked.model} ({checked.model_type})"
    if checked.path == REFUSED:
        yield "runs", f"no: {checked.reason}"
        return
    if checked.note is not None:
        yield "is a", checked.note
    if checked.path == FALLBACK:
        from chairlift.models.fallback.model import NOTICE

        yield "runs", f"by the fallback: its code is {NOTICE}"
    else:
        yield "runs", "natively"
    yield "size", f"{checked.num_parameters:,} weights, up to {checked.max_model_len:,} tokens"
    if checked.stored or checked.stored_bytes:
        files = "" if checked.stored_bytes is None else f", {format_bytes(checked.stored_bytes)}"
        yield "stored", f"{checked.stored or 'not quantized'}{files}"
    if checked.tokenizer is not None:
        yield "tokenizer", checked.tokenizer
    for kind, size in checked.weight_bytes.items():
        yield f"{kind}", f"{format_bytes(size)} of weights"
    for kind, each in checked.formats.items():
        if each.weight_bytes is None:
            yield kind, f"not possible: {'; '.join(each.obstacles)}"
        else:
            yield kind, f"{format_bytes(each.weight_bytes)} of weights, on a {each.device}"
    tokens = checked.max_model_len
    per_token = checked.kv_bytes_per_token["bfloat16"]
    yield "KV cache", f"{per_token:,} bytes per token in bfloat16: {format_bytes(tokens * per_token)} for {tokens:,}"
    if checked.state_bytes_per_sequence:
        yield "state", f"{format_bytes(checked.state_bytes_per_sequence)} per sequence"


def _describe(model: KnownModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "default": model.name == DEFAULT_MODEL,
        "description": model.description,
        "licence": model.licence,
        "size_bytes": model.size,
        "cached": model.cached,
    }


def _table(models: list[KnownModel]) -> Table:
    table = Table("Name", "Description", "Licence", "Size", "Here", title="Known models", title_justify="left")
    for model in models:
        name = f"{model.name} (default)" if model.name == DEFAULT_MODEL else model.name
        size = f"{model.size / 1e6:.0f} MB"
        table.add_row(name, model.description, model.licence, size, "yes" if model.cached else "fetched on first use")
    return table
