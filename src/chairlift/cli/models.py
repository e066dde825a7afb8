"""`chairlift models`: the models, families and file formats that can be run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from chairlift.cli.app import MODELS, app
from chairlift.errors import InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL, KnownModel, WheelModel, known_models
from chairlift.options import format_bytes, parse_bytes
from chairlift.terminal.console import without_controls
from chairlift.terminal.tables import output_console, print_aligned

if TYPE_CHECKING:
    from chairlift.engine.model_check import ModelCheck
    from chairlift.engine.model_fit import Fit
    from chairlift.vision.model_images import ImagesCheck

FORMATS = {
    "safetensors": "a folder with config.json, tokenizer.json and .safetensors files, one or many; also quantized by "
    "compressed-tensors, AWQ, GPTQ, bitsandbytes or to fp8",
    "gguf": "one .gguf file, in any of its quantizations; tokenizer and chat template come from the file",
    "hub": "a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, fetched when it is reachable",
}

# Of the table of known models, for --json.
LISTED = ("description", "licence", "hub_id", "gated", "num_parameters", "context", "cpu_bytes", "gpu_bytes")


@app.command(
    group=MODELS,
    examples=[
        "chairlift models",
        "chairlift models --check Qwen/Qwen3-8B",
        "chairlift models --check qwen3-4b --memory 8GB",
        "chairlift models --check path/to/config.json --json",
    ],
)
def models(
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="MODEL",
            help="Say whether this model fits this machine, how it runs, and how much memory it needs, without loading "
            "weights: a known name, a folder, a config.json, a GGUF file or a Hugging Face id. The exit status is 1 if "
            "it cannot run at all.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --check: whether it fits into this much free memory, such as 8GB, not what is free here.",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="With --check: whether it fits with its weights in this format, not in the first one that fits.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models known by name, the families and the file formats that can be run; or check one model."""
    if check is not None:
        _check(check, memory, quantization, as_json=as_json)
        return
    for name, value in (("memory", memory), ("quantization", quantization)):
        if value is not None:
            raise InvalidParameter(name, "only goes with --check MODEL")
    from chairlift.models import supported_families

    if as_json:
        entries = [describe_known(model) for model in known_models()]
        typer.echo(json.dumps({"models": entries, "families": supported_families(), "formats": FORMATS}, indent=2))
        return
    console = Console()
    for number, line in enumerate(_known_lines(known_models())):
        console.print(line, style="dim" if number and not number % 2 else "bold", markup=False, highlight=False)
    console.print(
        "\nCPU, GPU: memory of the weights there. A model is fetched on first use, or by chairlift pull NAME; the "
        "licence of a gated one must be accepted first. chairlift models --check NAME says whether one fits here.",
        highlight=False,
    )
    console.print("\n[bold]Families[/bold]  " + ", ".join(supported_families()))
    console.print("Other causal language models of transformers run through a fallback.\n")
    console.print("[bold]Formats[/bold] of MODEL")
    for name, meaning in FORMATS.items():
        console.print(f"  {name:<12} {meaning}")


def _check(name: str, memory: str | None, quantization: str | None, *, as_json: bool) -> None:
    from chairlift.config import EngineConfig
    from chairlift.engine.model_check import REFUSED, check_model
    from chairlift.engine.model_fit import fit_model

    free = None if memory is None else parse_bytes("memory", memory)
    config = EngineConfig(quantization=quantization)
    checked = check_model(name)
    fit = fit_model(name, checked, config, free=free)
    if as_json:
        answer = asdict(fit) | {"command": fit.command(name) if fit.fits else None}
        typer.echo(json.dumps(asdict(checked) | {"fit": answer}, indent=2))
    else:
        console = Console(highlight=False)
        where = "this machine" if memory is None else memory
        console.print(f"fits {where}: {fit.sentence()}", markup=False)
        print_grid([*fit_rows(fit, name), *_check_rows(checked)])
    if checked.path == REFUSED:
        raise typer.Exit(1)


def fit_rows(fit: Fit, name: str, verb: str = "serve") -> Iterator[tuple[str, str]]:
    """How a model runs here: the command and the memory, or what fits in its place."""
    if fit.fits:
        yield "run it", fit.command(name, verb)
        yield "memory", fit.memory()
    elif fit.nearest is not None:
        yield "fits", f"{fit.nearest}: {fit.nearest_command}"


def print_grid(rows: Iterable[tuple[str, str]]) -> None:
    grid = Table.grid("key", Column("value", overflow="fold"), padding=(0, 2))
    for key, value in rows:
        grid.add_row(key, Text(without_controls(value)))
    print_aligned(output_console(), grid)


def _check_rows(checked: ModelCheck) -> Iterator[tuple[str, str]]:
    from chairlift.engine.model_check import FALLBACK, PLAIN_DEVICES, REFUSED

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
        yield kind, f"{format_bytes(size)} of weights, on a {PLAIN_DEVICES[kind]}"
    for kind, each in checked.formats.items():
        if each.weight_bytes is None:
            yield kind, f"not possible: {'; '.join(each.obstacles)}"
        else:
            on_cpu = "" if each.cpu_weight_bytes is None else f", {format_bytes(each.cpu_weight_bytes)} on a CPU"
            yield kind, f"{format_bytes(each.weight_bytes)} of weights, on a {each.device}{on_cpu}"
    tokens = checked.max_model_len
    per_token = checked.kv_bytes_per_token["bfloat16"]
    yield "KV cache", f"{per_token:,} bytes per token in bfloat16: {format_bytes(tokens * per_token)} for {tokens:,}"
    if checked.state_bytes_per_sequence:
        yield "state", f"{format_bytes(checked.state_bytes_per_sequence)} per sequence"
    if checked.images is not None:
        yield "images", _image_words(checked.images)


def _image_words(images: ImagesCheck) -> str:
    if images.obstacle is not None:
        return f"not read: {images.obstacle}"
    count = images.tokens_per_megapixel
    tokens = "their tokens are known when its files are here" if count is None else f"{count:,} tokens per megapixel"
    return f"read on a CPU, with {format_bytes(images.weight_bytes)} of vision weights; {tokens}"


def describe_known(model: KnownModel) -> dict[str, Any]:
    """What the table says about a known model, and whether it is here."""
    values = {name: value for name, value in asdict(model).items() if name in LISTED}
    return {
        "name": model.name,
        "default": model.name == DEFAULT_MODEL,
        **values,
        "size_bytes": model.size,
        "size_is_exact": isinstance(model, WheelModel),
        "cached": model.cached,
    }


def _known_lines(models: list[KnownModel]) -> Iterator[str]:
    """The table of known models, with two lines for each: at 80 columns one has no room for what a model is."""
    yield f"{'Known models':<18}{'Weights':>8}{'Download':>9}{'CPU':>11}{'GPU':>11}  {'Licence':<17}Here"
    for model in models:
        size = format_size(model.size) if isinstance(model, WheelModel) else f"~{format_size(model.size)}"
        figures = f"{format_count(model.num_parameters):>8}{size:>9}{format_bytes(model.cpu_bytes):>11}"
        licence = f"{model.licence.removesuffix(' Community')}, gated" if model.gated else model.licence
        here = "yes" if model.cached else "no"
        yield f"{model.name:<18}{figures}{format_bytes(model.gpu_bytes):>11}  {licence:<17}{here}"
        yield f"  {model.description}{' (the default)' if model.name == DEFAULT_MODEL else ''}"


def format_size(count: float) -> str:
    """Bytes as hubs and disks count them: 98362432 -> 98 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def format_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 0.95e9 else f"{count / 1e6:.0f}M"
