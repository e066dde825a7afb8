"""Commands whose help shows options in groups, at 80 columns, with examples below.

The help of a command with many options is short: `--help=GROUP` shows a group of them, and `--help=all` all of them.

app = Commands(help="What the program does.", examples=["chairlift serve"])

@app.command(group="Run a model", examples=["chairlift serve", "chairlift serve Qwen/Qwen3-0.6B"])
def serve(engine: EngineOptions) -> None:
    "Serve a model to OpenAI clients."
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from chairlift.errors import InvalidParameter
from chairlift.terminal.option_groups import source_of, with_option_groups

MAX_HELP_WIDTH = 100
_FLAGS_WIDTH = 30  # width of the flags column; longer flags have their help on the next line

Register = Callable[[Callable[..., Any]], Callable[..., Any]]


class _GroupedHelp:
    """Mixin for help in plain text, because typer's tables truncate long flags at 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_sections(formatter, self._sections(ctx))

    def _sections(self, ctx: Any, without: Collection[str] = ()) -> dict[str, list[tuple[str, str]]]:
        """The parameters by the titles of their groups."""
        command: Any = self
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in command.get_params(ctx):
            record = None if parameter.name in without else parameter.get_help_record(ctx)
            if record is not None:
                if parameter.param_type_name == "argument":
                    record = (record[0].partition(" <")[0], record[1])  # The type of an argument is no news.
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        return sections

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        command: Any = self
        if command.epilog:
            with formatter.section("Examples"):
                for line in command.epilog.splitlines():
                    formatter.write(_wrap_example(line, formatter.width - formatter.current_indent, "  "))


_SHORT, _ALL = "short", "all"
_HELP = "help_view"  # the parameter of --help
_VIEW = "chairlift.help"  # the key of the view of the help that was asked for


class Command(_GroupedHelp, TyperCommand):
    """A command whose help has views: a short one, one of each group of options, and one of all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        args = [f"--help={_SHORT}" if arg in ("--help", "-h") and i < end else arg for i, arg in enumerate(args)]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            parameter = error.param
            if parameter is not None and source_of(ctx, parameter.name) == "ENVIRONMENT":
                error.param_hint = f"the variable {parameter.envvar}"  # the value came from the environment
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; --help is one of them."""
        return list(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`, which errors point to."""
        return next((parameter for parameter in self.params if parameter.name == _HELP), None)

    @property
    def _uncommon(self) -> frozenset[str]:
        """The parameters that the short help leaves out."""
        command: Any = self
        return getattr(command.callback, "uncommon", frozenset())

    def show_help(self, ctx: Any, view: str) -> None:
        ctx.meta[_VIEW] = view
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

    def views(self, ctx: Any) -> list[str]:
        return [*map(_slug, self._groups(ctx)), _ALL]

    def _groups(self, ctx: Any) -> list[str]:
        """The titles of the groups of options."""
        command: Any = self
        titles = (getattr(parameter, "rich_help_panel", None) for parameter in command.get_params(ctx))
        return [*dict.fromkeys(title for title in titles if title is not None)]

    def _group(self, ctx: Any, name: str) -> str:
        """The title of a group, by the beginning of its name or of a word in it."""
        titles, typed = self._groups(ctx), name.lower().replace(" ", "-")
        for matches in (
            [title for title in titles if _slug(title) == typed],
            [title for title in titles if title.lower().replace(" ", "-").startswith(typed)],
            [title for title in titles if typed in title.lower().split()],
        ):
            if len(matches) == 1:
                return matches[0]
        raise InvalidParameter("--help", f"unknown group {name!r}; choose from {', '.join(self.views(ctx))}")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        view = ctx.meta.get(_VIEW, _SHORT)
        if view in (_SHORT, _ALL):
            super().format_help(ctx, formatter)
            return
        title = self._group(ctx, view)
        self.format_usage(ctx, formatter)
        _write_sections(formatter, {title: self._sections(ctx)[title]})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get(_VIEW, _SHORT) == _ALL or not self._uncommon:
            _write_sections(formatter, self._sections(ctx))
        else:
            arguments, *others = self._sections(ctx, self._uncommon).values()
            common = [(flags, _first_sentence(text)) for section in others for flags, text in section]
            _write_sections(formatter, {"Arguments": arguments, "Options": common})
            with formatter.section("More options"):
                formatter.write_text(
                    f"--help=all shows every option, --help=GROUP those of a group: "
                    f"{', '.join(map(_slug, self._groups(ctx)))}"
                )


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
        register = super().command(
            name,
            cls=Command,
            epilog="\n".join(examples),
            rich_help_panel=group or "Commands",
            add_help_option=False,
        )
        return lambda function: register(_with_help_option(with_option_groups(function)))


def _with_help_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--help`, which takes the name of a view."""

    def show(context: typer.Context, view: str | None) -> None:
        if view is not None and not context.resilient_parsing:
            assert isinstance(context.command, Command)
            context.command.show_help(context, view)

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        assert isinstance(ctx.command, Command)
        return [view for view in ctx.command.views(ctx) if view.startswith(incomplete)]

    views = (
        " --help=GROUP shows a group of options, --help=all all of them." if getattr(command, "uncommon", ()) else ""
    )
    option = typer.Option(
        "--help",
        "-h",
        metavar="[=GROUP]",
        help=f"Show this message and exit.{views}",
        is_eager=True,
        callback=show,
        autocompletion=complete,
        show_default=False,
    )

    @wraps(command)
    def without_help(**values: Any) -> Any:
        values.pop(_HELP)
        return command(**values)

    signature = inspect.signature(command)
    annotation = Annotated[str | None, option]
    added = inspect.Parameter(_HELP, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    parameters = [*signature.parameters.values(), added]
    without_help.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    without_help.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return without_help


def _write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records, col_max=_FLAGS_WIDTH)


def _first_sentence(text: str) -> str:
    """The first sentence of an option's help, and its default."""
    sentences, bracket, default = text.partition("  [")
    return f"{sentences.partition('. ')[0].rstrip('.')}.{bracket}{default}"


def _slug(title: str) -> str:
    """The name of a group on the command line: KV cache -> kv-cache, Device and precision -> device."""
    words = title.lower().split()
    return words[0] if len(words) > 2 else "-".join(words)


def _wrap_example(line: str, width: int, indent: str) -> str:
    """Wrap a long command as a shell accepts it, with line breaks before options only."""
    lines = [""]
    for part in re.split(r" (?=-)", line):
        if lines[-1] and len(indent + lines[-1] + part) + 3 > width:
            lines.append("  " + part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(indent + text for text in lines) + "\n"
