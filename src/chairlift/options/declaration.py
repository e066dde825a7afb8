"""Declaring an option: a dataclass field that carries its help, group, choices, check and aliases.

    @dataclass(frozen=True, kw_only=True)
    class EngineConfig:
        block_size: int = option(16, help="Tokens per block of the KV cache.", group="KV cache", check=at_least(1))

`options_of(EngineConfig)` returns the declared options. The command line, the environment variables, the config file,
the aliases and docs/options.md are generated from them, and `check_options(config)` checks the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from chairlift.errors import InvalidParameter

Check = Callable[[str, Any], object]
"""Called with the parameter's name and its value; raises InvalidParameter."""

_METADATA_KEY = "option"
_SCALARS = {str: "a text", Path: "a path", float: "a number", int: "an integer", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: the name and type of its field, and its declaration."""

    name: str = ""
    default: Any = None
    types: frozenset[type] = frozenset()  # accepted in Python; empty if `check` decides
    optional: bool = False  # whether None is accepted
    help: str
    group: str
    choices: Callable[[], Sequence[str]] | None = None
    check: Check | None = None
    aliases: tuple[str, ...] = ()  # vLLM's names
    opposite_aliases: tuple[str, ...] = ()  # vLLM's names for the negated option
    metavar: str | None = None
    forms: Callable[[], Sequence[str]] | None = None  # ways to write a value, shown where `choices` cannot list all
    default_text: str | None = None  # shown instead of the default value
    flag: str | None = None  # the long flag if it differs from the field's name
    short: str | None = None
    negatable: bool = True  # whether a flag has a --no- form
    on_command_line: bool = True
    in_environment: bool = True

    @property
    def kind(self) -> type:
        """The type of one value on the command line; `list` for an option that may be repeated."""
        return next((kind for kind in _SCALARS if kind in self.types), list)

    @property
    def long_flag(self) -> str:
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str | None:
        """The environment variable."""
        return f"CHAIRLIFT_{self.name.upper()}" if self.in_environment else None

    def check_value(self, value: Any, parameter: str | None = None) -> None:
        """Raise InvalidParameter, with the name `parameter`, if this value alone is invalid."""
        parameter = parameter or self.name
        if value is None and self.optional:
            return
        if self.types and not self._has_type(value):
            raise InvalidParameter(parameter, f"must be {_SCALARS[self.kind]}, got {value!r:.100}")
        if not self.types and self.check is None and not _is_list_of_texts(value):
            raise InvalidParameter(parameter, f"must be a list of texts, got {value!r:.100}")
        if self.choices is not None and value not in self.choices():
            raise InvalidParameter(parameter, f"unknown {value!r:.100}; choose from {', '.join(self.choices())}")
        if self.check is not None:
            self.check(parameter, value)

    def _has_type(self, value: Any) -> bool:
        if isinstance(value, bool):
            return bool in self.types
        return isinstance(value, tuple(self.types)) or (float in self.types and isinstance(value, int))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def option(
    default: Any,
    *,
    help: str,
    group: str,
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    **declared: Any,
) -> Any:
    """A dataclass field that is an option; see `Option` for what can be declared."""
    find = choices if choices is None or callable(choices) else lambda: choices
    metadata = {_METADATA_KEY: Option(default=default, help=help, group=group, choices=find, **declared)}
    return field(default=default, metadata=metadata)


def options_of(config: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in the order of its fields."""
    hints = get_type_hints(config)
    return tuple(
        _complete(item.metadata[_METADATA_KEY], item.name, hints[item.name])
        for item in fields(config)
        if _METADATA_KEY in item.metadata
    )


def _complete(declared: Option, name: str, hint: Any) -> Option:
    members = set(get_args(hint)) or {hint}
    types = members - {NoneType}
    known = types if types <= _SCALARS.keys() else set()
    return replace(declared, name=name, types=frozenset(known), optional=NoneType in members)


def check_options(config: Any) -> None:
    """Check every option of `config` on its own."""
    for declared in options_of(type(config)):
        declared.check_value(getattr(config, declared.name))
