"""The application that the commands register with."""

from __future__ import annotations

import errno
import os
from typing import Annotated, Any

import typer

from chairlift import __version__
from chairlift.cli.environment import check_environment
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options.declaration import alias_flags, options_of
from chairlift.registry import load_plugins
from chairlift.terminal.commands import CommandGroup, Commands
from chairlift.terminal.console import show_error

RUN, UNDERSTAND = "Run a model", "Measure, simulate and understand"


_BROKEN_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


class _Chairlift(CommandGroup):
    """Prints a ChairliftError, or that a disk is full, as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            check_environment(os.environ)
            load_plugins()
            return super().invoke(ctx)
        except ChairliftError as error:
            if os.environ.get("CHAIRLIFT_DEBUG") == "1":
                raise
            show_error(_describe(error, self.commands.get(ctx.invoked_subcommand)))
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in _BROKEN_DISK or os.environ.get("CHAIRLIFT_DEBUG") == "1":
                raise
            show_error(f"cannot write{f' {str(error.filename)!r}' if error.filename else ''}: {error.strerror}")
            raise typer.Exit(1) from error


def _describe(error: ChairliftError, command: Any) -> str:
    """Return the error's message, with the parameter written as the flag of the command, if it has begun."""
    if isinstance(error, InvalidParameter) and command is not None:
        flag = _flags(command).get(error.parameter)
        if flag is not None:
            return f"{flag}: {error.problem}"
    return str(error)


def _flags(command: Any) -> dict[str, str]:
    """Return the long flags of a command and its subcommands, by parameter name and by their own name."""
    found: dict[str, str] = {}
    for child in getattr(command, "commands", {}).values():
        found |= _flags(child)
    for parameter in command.params:
        for flag in parameter.opts:
            if flag.startswith("--"):
                found |= {parameter.name: flag, flag.removeprefix("--").replace("-", "_"): flag}
    return found


app = Commands(
    cls=_Chairlift,
    help="An LLM inference engine built around continuous batching: one ragged, paged batch per step.",
    aliases=alias_flags(options_of(EngineConfig)),
    completion=True,
    examples=[
        "chairlift serve",
        "chairlift chat",
        'chairlift generate "The capital of France is" --temperature 0',
        "chairlift bench throughput --json result.json",
    ],
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"chairlift {__version__}")
        raise typer.Exit


@app.callback()
def chairlift(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass
