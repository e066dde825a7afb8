"""The application that the commands register with."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from chairlift import __version__
from chairlift.cli.other_engines import advice_for
from chairlift.cluster.options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import alias_flags, options_of
from chairlift.registry import idle_plugins, load_plugins
from chairlift.server.options import ServerOptions
from chairlift.terminal.commands import CommandGroup, Commands
from chairlift.terminal.console import note, show_error
from chairlift.terminal.options import ChatOptions, EngineOptions, SamplingOptions, SearchOptions

RUN, MODELS, SERVERS = "Run a model", "Models on this machine", "Servers and fleets"
UNDERSTAND = "Measure, simulate and understand"
# The help lists these first, in the order in which a newcomer needs them.
FIRST = (
    "run",
    "chat",
    "serve",
    "generate",
    "batch",
    "pull",
    "list",
    "show",
    "rm",
    "models",
    "cache",
    "ps",
    "stop",
    "cluster",
)
RUNS_MODELS = ("run", "chat", "serve", "generate", "batch")
_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM})
_BROKEN_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})

PREFIX = "CHAIRLIFT_"
GROUPS = (EngineOptions, ServerOptions, ClusterOptions, SamplingOptions, SearchOptions, ChatOptions)

VARIABLES: Mapping[str, str] = {
    "CHAIRLIFT_API_KEY": "for `serve` a key to require besides those of `--api-key`; for others the key to send",
    "CHAIRLIFT_CACHE": "the folder for fetched models, packed weights and the compiled kernels of CPUs",
    "CHAIRLIFT_DEBUG": "`1` shows errors with their traceback",
    "CHAIRLIFT_PLUGINS": "modules or .py files with own policies, orderings, backends, …; separated by commas",
}
# Read by the examples, the tests and the files in deploy/.
TOOL_VARIABLES = frozenset(
    {
        "CHAIRLIFT_EXAMPLE_MODEL",
        "CHAIRLIFT_EXAMPLE_PORT",
        "CHAIRLIFT_LM_EVAL_PYTHON",
        "CHAIRLIFT_OPENAI_AGENTS_PYTHON",
        "CHAIRLIFT_REQUIRE_TOOLS",
        "CHAIRLIFT_SMG",
        "CHAIRLIFT_VARIANT",
    }
)
# What Kubernetes sets in every container for a service whose name begins with "chairlift".
_SERVICE_VARIABLE = re.compile(r"(?:_SERVICE_HOST|_SERVICE_PORT(?:_\w+)?|_PORT(?:_\d+_\w+)?)$")


_UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export it.


class _Chairlift(CommandGroup):
    """Prints a ChairliftError, or that a disk is full, as one line instead of a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

    def invoke(self, ctx: Any) -> Any:
        arguments = [*ctx._protected_args, *ctx.args]
        try:
            is_quiet = not {"-q", "--quiet"}.isdisjoint(arguments)
            for warning in () if is_quiet else [*check_environment(os.environ), *_idle_plugins()]:
                note(f"warning: {warning}", "yellow")
            load_plugins()
            return super().invoke(ctx)
        except _UsageError as error:
            unknown = getattr(error, "option_name", "") if ctx.invoked_subcommand in RUNS_MODELS else ""
            show_error(advice_for(unknown, arguments) or _describe_usage(error))
            raise typer.Exit(2) from error
        except ChairliftError as error:
            if os.environ.get("CHAIRLIFT_DEBUG") == "1":
                raise
            show_error(_describe(error, self.commands.get(ctx.invoked_subcommand)))
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in _BROKEN_DISK | _NO_ACCESS or os.environ.get("CHAIRLIFT_DEBUG") == "1":
                raise
            verb = "no access to" if error.errno in _NO_ACCESS else "cannot write"
            show_error(f"{verb}{f' {str(error.filename)!r}' if error.filename else ''}: {error.strerror}")
            raise typer.Exit(1) from error


def _describe_usage(error: Any) -> str:
    """One line about arguments that cannot be read, with the command whose help says more."""
    problem = re.sub(r"Input should be a valid (\w+).*", r"must be a valid \1", error.format_message().rstrip("."))
    problem = problem.replace("a valid integer", "a whole number")
    invalid = re.match(r"Invalid value for (?:'(--[^']+)'(?: / '[^']+')*|(the variable \w+)): (.*)", problem, re.DOTALL)
    if invalid is not None:
        problem = f"{invalid[1] or invalid[2]}: {invalid[3]}"
    path = "chairlift" if error.ctx is None else error.ctx.command_path
    return f"{problem[0].lower()}{problem[1:]}{' See' if problem.endswith('?') else '; see'} `{path} --help`"


def _idle_plugins() -> list[str]:
    return [f"the plugin {name!r} registers nothing; docs/extending/ shows what can be" for name in idle_plugins()]


def _describe(error: ChairliftError, command: Any) -> str:
    """Return the error's message, with the parameter written as the flag of the command, if it has begun."""
    if isinstance(error, InvalidParameter) and command is not None:
        flag = _flags(command).get(error.parameter)
        if flag is not None:
            return f"{flag}: {error.problem}"
    return str(error)


def _flags(command: Any) -> dict[str, str]:
    """Return the long flags of a command and its subcommands, by parameter name and by their own name."""
    flags: dict[str, str] = {}
    for child in getattr(command, "commands", {}).values():
        flags |= _flags(child)
    for parameter in command.params:
        for flag in parameter.opts:
            if flag.startswith("--"):
                flags |= {parameter.name: flag, flag.removeprefix("--").replace("-", "_"): flag}
    return flags


def known_variables() -> set[str]:
    """All variables that have a meaning."""
    of_options = {option.variable for group in GROUPS for option in options_of(group) if option.on_command_line}
    return {*VARIABLES, *TOOL_VARIABLES, *(variable for variable in of_options if variable is not None)}


def check_environment(environment: Iterable[str]) -> list[str]:
    """Return warnings about variables that look like those of the project and are none.

    Raises InvalidParameter for one that looks like an option of access: a server may be open without it.
    """
    warnings = []
    own = {name for name in environment if name.startswith(PREFIX)}
    known = known_variables()
    access = {"CHAIRLIFT_API_KEY", *(one.variable for one in options_of(ServerOptions) if one.group == "Access")}
    for name in sorted(own - known):
        if _is_of_a_service(name, own):
            continue
        close = get_close_matches(name.removeprefix(PREFIX), [variable.removeprefix(PREFIX) for variable in known], n=1)
        suggestion = f"did you mean {PREFIX}{close[0]}?" if close else "docs/options.md lists all"
        if close and f"{PREFIX}{close[0]}" in access:
            raise InvalidParameter(name, f"is not a variable of Chairlift; {suggestion}")
        warnings.append(f"{name} is not a variable of Chairlift, and has no effect; {suggestion}")
    return warnings


def _is_of_a_service(name: str, environment: set[str]) -> bool:
    suffix = _SERVICE_VARIABLE.search(name)
    return suffix is not None and f"{name[: suffix.start()]}_SERVICE_HOST" in environment


app = Commands(
    cls=_Chairlift,
    help="An LLM inference engine built around continuous batching: one ragged, paged batch per step.",
    aliases=alias_flags((*options_of(EngineConfig), *options_of(ServerOptions))),
    completion=True,
    examples=[
        'chairlift run smollm2-135m "Why is the sky blue?"',
        "chairlift chat",
        "chairlift serve",
        "chairlift pull qwen3-0.6b",
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
