"""Options that take several values, separated by commas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import typer

from chairlift.errors import InvalidParameter


def number_list(
    help: str, *names: str, kind: Callable[[str], Any] = int, panel: str | None = None, default: str | None = None
) -> Any:
    """A typer option for numbers such as 1,4,16; `default` is what the help shows as its default."""

    def numbers(value: Any) -> Any:
        return tuple(_parse(value, kind)) if isinstance(value, str) else value

    return typer.Option(
        *names, help=help, metavar="N[,N…]", parser=numbers, rich_help_panel=panel, show_default=default or True
    )


def parse_numbers(parameter: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """ "1,4,16" -> [1, 4, 16]."""
    try:
        return _parse(text, kind)
    except ValueError as error:
        raise InvalidParameter(parameter, str(error)) from None


def parse_names(parameter: str, text: str, choices: Collection[str]) -> list[str]:
    """ "chat, rag" -> ["chat", "rag"]; each must be one of `choices` and occur once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in choices:
            raise InvalidParameter(parameter, f"there is no {name!r}; choose from {', '.join(choices)}")
    if len(set(names)) < len(names):
        raise InvalidParameter(parameter, f"{text!r} names one twice")
    return names


def _parse(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"must be numbers separated by commas, got {text!r}") from None
