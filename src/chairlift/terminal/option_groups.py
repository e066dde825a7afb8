"""Dataclasses as groups of options: a command takes one as a parameter and gets an option for each field.

A field is an option if it was made by `chairlift.options.option`; such options are also read from
environment variables and from the file that --config names. Fields annotated with a `typer.Option` work too:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ReportOptions:
        plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures there.")] = None

The order of precedence is: command line, environment variable, config file, default.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from chairlift.errors import InvalidParameter
from chairlift.options import Option, options_of, read_config_file
from chairlift.terminal.metavars import metavar, with_metavar

_CONFIG_FILE, _CONTEXT, _MODEL_ARGUMENT = "config_file", "typer_context", "model_argument"
WIDEST_CHOICES = 60  # characters; longer lists go into the help text, which is wrapped


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of `command` that is a dataclass by one option for each of its fields.

    Typer reads a command's options from its signature, so the command gets a signature that lists them all, and the
    dataclasses are built when it is called. That checks them before the command's first line runs.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _field_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    declared = tuple(option for group in groups.values() for option in options_of(group) if option.on_command_line)
    if declared:
        parameters.append(_config_parameter(declared))
    takes_model = _add_model_argument(parameters)
    own_context = next((item.name for item in parameters if item.annotation is typer.Context), None)
    if own_context is None:
        parameters.append(inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @wraps(command)
    def spread(**values: Any) -> None:
        values.pop(_CONFIG_FILE, None)
        context = values[own_context] if own_context else values.pop(_CONTEXT)
        if takes_model and (argument := values.pop(_MODEL_ARGUMENT)) is not None:
            values["model"] = _instead_of_option(context, argument)
        for name, group in groups.items():
            values[name] = _build(group, {field: values.pop(field) for field in field_names(group)}, context)
        command(**values)

    parameters = [with_metavar(parameter) for parameter in parameters]
    spread.uncommon = _uncommon(groups.values())  # type: ignore[attr-defined]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _add_model_argument(parameters: list[inspect.Parameter]) -> bool:
    """Let a command that has --model take the model as an argument as well, after its own arguments.

    Not where it has one by that name, or where its last argument takes all that follow.
    """
    infos = {item.name: _info(item) for item in parameters}
    arguments = [(item, infos[item.name]) for item in parameters if isinstance(infos[item.name], ArgumentInfo)]
    if not isinstance(infos.get("model"), OptionInfo) or any(
        getattr(info, "metavar", None) == "MODEL" or "list[" in str(item.annotation) for item, info in arguments
    ):
        return False
    settings = typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    annotation = Annotated[str | None, settings]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter(_MODEL_ARGUMENT, kind, default=None, annotation=annotation))
    return True


def _info(parameter: inspect.Parameter) -> Any:
    """How typer reads a parameter, where its annotation says so."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, ParameterInfo)), None)


def _instead_of_option(context: typer.Context, model: str) -> str:
    """Count a model that was given as an argument as the value of --model on the command line."""
    source = context.get_parameter_source("model")
    assert source is not None
    if source.name == "COMMANDLINE":
        raise InvalidParameter("model", f"was given twice: {model!r} and {context.params['model']!r}")
    context.set_parameter_source("model", type(source)["COMMANDLINE"])
    context.params["model"] = model
    return model


def _uncommon(groups: Iterable[type]) -> frozenset[str]:
    """The parameters that a short help leaves out."""
    shown = (option for group in groups for option in options_of(group) if option.on_command_line)
    return frozenset(option.name for option in shown if not option.common)


def field_names(group: Any) -> list[str]:
    """Return the fields of a group that are options on the command line: its own, then inherited ones."""
    hidden = {option.name for option in options_of(group) if not option.on_command_line}
    names = [field.name for field in fields(group) if field.name not in hidden]
    return sorted(names, key=lambda name: name not in group.__annotations__)


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: field.default for field in fields(group)}
    declared = {option.name: option for option in options_of(group)}
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(
            name,
            kind,
            default=defaults[name],
            annotation=_annotation(declared[name]) if name in declared else hints[name],
        )
        for name in field_names(group)
    ]


def _annotation(option: Option) -> Any:
    """Return the annotation of an option for typer."""
    flags = [option.long_flag]
    if option.kind is bool and option.negatable:
        flags = [f"{option.long_flag}/--no-{option.long_flag.removeprefix('--')}"]
    if option.short is not None:
        flags.append(option.short)
    settings: dict[str, Any] = {
        "help": option.help,
        "rich_help_panel": option.group,
        "metavar": option.metavar or metavar(option.name, option.kind),
        "envvar": option.variable,
        "show_envvar": False,
        "show_default": option.default_text or option.default is not None,
    }
    shown = option.choices or option.forms
    if shown is not None:
        choices = _show_choices(shown)
        if len(choices) <= WIDEST_CHOICES:
            settings["metavar"] = choices
        else:
            settings["metavar"], settings["help"] = "NAME", f"{option.help} One of {choices[1:-1].replace('|', ', ')}."
    if option.choices is not None:
        settings["autocompletion"] = _completer(option.choices)
    value = list[str] if option.kind is list else option.kind
    return Annotated[value | None if option.default is None else value, typer.Option(*flags, **settings)]


def _show_choices(choices: Callable[[], Iterable[str]]) -> str:
    try:
        return f"[{'|'.join(choices())}]"
    except InvalidParameter:  # a plugin is missing: fail when options are checked, not on import
        return "NAME"


def _completer(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    return lambda incomplete: [choice for choice in choices() if choice.startswith(incomplete)]


def _build(group: type, values: Mapping[str, Any], context: typer.Context) -> Any:
    """Build the dataclass. An error about a value from the environment names the variable."""
    try:
        return group(**values)
    except InvalidParameter as error:
        variables = {option.name: option.variable for option in options_of(group)}
        if source_of(context, error.parameter) == "ENVIRONMENT":
            raise InvalidParameter(str(variables[error.parameter]), error.problem) from None
        raise


# ---- the config file --------------------------------------------------------------------------------------------


def _config_parameter(declared: tuple[Option, ...]) -> inspect.Parameter:
    def read(context: typer.Context, value: Path | None) -> Path | None:
        if value is not None and not context.resilient_parsing:
            values, lists = read_config_file(value, declared), {one.name for one in declared if one.kind is list}
            context.default_map = {name: _typed(values[name], name in lists) for name in values}
        return value

    help = "Read options from this YAML or TOML file. The variables CHAIRLIFT_<OPTION> set options too."
    settings = typer.Option("--config", metavar="FILE", help=help, is_eager=True, callback=read, show_default=False)
    annotation = Annotated[Path | None, settings]
    return inspect.Parameter(_CONFIG_FILE, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _typed(value: Any, repeated: bool) -> Any:
    """Convert a value of a config file to command line form: a mapping becomes a repeated NAME=VALUE, or JSON."""
    if not isinstance(value, Mapping):
        return value
    return [f"{name}={number}" for name, number in value.items()] if repeated else json.dumps(value)


# ---- where values come from -------------------------------------------------------------------------------------


def refuse_given(context: typer.Context, names: Iterable[str], problem: str) -> None:
    """Raise if any of these options was given, since it would have no effect."""
    for name in names:
        if given(context, name):
            raise InvalidParameter(name, problem)


def given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line or in the --config file, even with its default value."""
    return source_of(context, name) in ("COMMANDLINE", "DEFAULT_MAP")


def left_out(context: typer.Context, name: str) -> bool:
    """Return whether an option has its default because nothing sets it: no command line, variable or file."""
    return source_of(context, name) == "DEFAULT"


def source_of(context: Any, name: str) -> str:
    """Return COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (a config file), DEFAULT, or "" for an unknown option."""
    source = context.get_parameter_source(name)
    return "" if source is None else str(source.name)
