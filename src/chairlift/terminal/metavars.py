"""The word that stands in the help for the value of an option: one for each kind of value, over all commands."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from typer.models import ParameterInfo

# Of values that are texts; a text that is not listed is a name.
TEXTS: Mapping[str, str] = {
    "address": "ADDRESS",
    "api_key": "KEY",
    "batch": "N[,N…]",
    "device": "DEVICE",
    "dtype": "TYPE",
    "host": "ADDRESS",
    "kv_dtype": "TYPE",
    "memory_tolerance": "SIZE",
    "model": "MODEL",
    "output_len": "LOW:HIGH",
    "prompt_len": "LOW:HIGH",
    "stop": "TEXT",
    "system": "TEXT",
    "system_prompt": "TEXT",
    "url": "URL",
}
NAMES = "NAME[,NAME…]"
LISTS = frozenset(
    {
        *("block_types", "cases", "claims", "engines", "experiments", "formats", "kernels", "modes", "peers"),
        *("proposers", "scenarios", "strategies"),
    }
)
FOLDERS = frozenset({"output"})  # Other paths are those of files.
TIMES = ("timeout", "seconds", "delay", "duration", "interval", "cold_start", "target_ttft", "target_tpot", "spread")


def metavar(name: str, kind: type) -> str:
    """The word for the value of an option, of which this is the name and the type."""
    if kind is int:
        return "N"
    if kind is float:
        if name.endswith("_ms"):
            return "MILLISECONDS"
        return "SECONDS" if name.endswith(TIMES) else "MINUTES" if name == "minutes" else "NUMBER"
    if kind is Path:
        return "FOLDER" if name in FOLDERS else "FILE"
    return NAMES if name in LISTS else TEXTS.get(name, "NAME")


def with_metavar(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter of a command, with a word for its value where it has none."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, *metadata = get_args(parameter.annotation)
    for index, info in enumerate(metadata):
        if isinstance(info, ParameterInfo) and info.metavar is None and (value := _kind_of_value(kind)) is not bool:
            metadata[index] = copy(info)
            metadata[index].metavar = metavar(parameter.name, value)
    return parameter.replace(annotation=Annotated[(kind, *metadata)])


def _kind_of_value(annotation: Any) -> type:
    """The type of one value of a parameter: of `list[int] | None` it is int."""
    members = [member for member in get_args(annotation) if member is not NoneType] or [annotation]
    return _kind_of_value(members[0]) if members[0] is not annotation else annotation
