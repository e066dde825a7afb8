"""Commands whose help shows options in groups, complete at 80 columns, with examples below.

app = Commands(help="What the program does.", examples=["chairlift serve"])

@app.command(group="Run a model", examples=["chairlift serve", "chairlift serve Qwen/Qwen3-0.6B"])
def serve(engine: EngineOptions) -> None:
    "Serve a model to OpenAI clients."
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from chairlift.terminal.option_groups import source_of, with_option_groups

MAX_HELP_WIDTH = 100
_FLAGS_WIDTH = 30  # width of the flags column; longer flags have their help on the next line

Register = Callable[[Callable[..., Any]], Callable[..., Any]]


class _GroupedHelp:
    """Mixin for help in plain text, because typer's tables truncate long flags at 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        command: Any = self
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":
                    record = (record[0].partition(" <")[0], record[1])  # The type of an argument is no news.
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        _write_sections(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        command: Any = self
        if command.epilog:
            with formatter.section("Examples"):
                for line in command.epilog.splitlines():
                    formatter.write(_wrap_example(line, formatter.width - formatter.current_indent, "  "))


class Command(_GroupedHelp, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            parameter = error.param
            if parameter is not None and source_of(ctx, parameter.name) == "ENVIRONMENT":
                error.param_hint = f"the variable {parameter.envvar}"  # the value came from the environment
            raise


class CommandGroup(_GroupedHelp, TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        _GroupedHelp.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            group = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(group, []).append((name, command.get_short_help_str(200)))
        _write_sections(formatter, sections)


class Commands(typer.Typer):
    """A typer application with this module's help, whose commands take option groups as parameters."""

    def __init__(
        self,
        *,
        help: str | None = None,
        examples: Sequence[str] = (),
        cls: type[TyperGroup] = CommandGroup,
        aliases: Mapping[str, str] | None = None,
        completion: bool = False,
    ) -> None:
        """`aliases` are other names of options, without dashes. `completion` adds --install-completion."""
        context_settings: dict[str, Any] = {
            "help_option_names": ["--help", "-h"],
            "max_content_width": MAX_HELP_WIDTH,
        }
        if aliases is not None:
            context_settings["token_normalize_func"] = lambda name: aliases.get(name, name)
        super().__init__(
            cls=cls,
            help=help,
            epilog="\n".join(examples),
            no_args_is_help=True,
            add_completion=completion,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings=context_settings,
        )

    def command(  # type: ignore[override]
        self, name: str | None = None, *, group: str | None = None, examples: Sequence[str] = ()
    ) -> Register:
        """Decorator: make a function a command. Its docstring is the help, its parameters are the options."""
        register = super().command(name, cls=Command, epilog="\n".join(examples), rich_help_panel=group or "Commands")
        return lambda function: register(with_option_groups(function))


def _write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records, col_max=_FLAGS_WIDTH)


def _wrap_example(line: str, width: int, indent: str) -> str:
    """Wrap a long command as a shell accepts it, with line breaks before options only."""
    lines = [""]
    for part in re.split(r" (?=-)", line):
        if lines[-1] and len(indent + lines[-1] + part) + 3 > width:
            lines.append("  " + part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(indent + text for text in lines) + "\n"
