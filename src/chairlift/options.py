"""Declaring an option: a dataclass field that carries its help, group, choices, check and aliases.

    @dataclass(frozen=True, kw_only=True)
    class EngineConfig:
        block_size: int = option(16, help="Tokens per block of the KV cache.", group="KV cache", check=at_least(1))

`options_of(EngineConfig)` returns the declared options. The command line, the environment variables, the config file,
the aliases and docs/options.md are generated from them, and `check_options(config)` checks the values."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from chairlift.errors import InvalidParameter


def at_least(lowest: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not lowest <= value < math.inf:
            raise InvalidParameter(parameter, f"must be at least {lowest:g}, got {value!r}")

    return check


def above(limit: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not limit < value < math.inf:
            raise InvalidParameter(parameter, f"must be above {limit:g}, got {value!r}")

    return check


def between(lowest: float, highest: float) -> Check:
    """Check that a value lies between two limits, both of which are allowed."""

    def check(parameter: str, value: Any) -> None:
        if not lowest <= value <= highest:
            raise InvalidParameter(parameter, f"must be from {lowest:g} to {highest:g}, got {value!r}")

    return check


def strictly_between(low: float, high: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not low < value < high:
            raise InvalidParameter(parameter, f"must be above {low:g} and below {high:g}, got {value!r}")

    return check


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
    common: bool = False  # whether the short help shows it
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


def option_of(config: type, name: str, **changes: Any) -> Any:
    """A dataclass field that is an option of another dataclass, with another default or help where `changes` say so."""
    declared = next(replace(each, **changes) for each in options_of(config) if each.name == name)
    return field(default=declared.default, metadata={_METADATA_KEY: declared})


def options_of(config: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in the order of its fields."""
    hints = get_type_hints(config)
    return tuple(
        _complete(item.metadata[_METADATA_KEY], item.name, hints[item.name])
        for item in fields(config)
        if _METADATA_KEY in item.metadata
    )


def _complete(declared: Option, name: str, hint: Any) -> Option:
    members = {get_origin(member) or member for member in get_args(hint) or [hint]}
    types = members - {NoneType}
    # On the command line, a mapping is written as text if the option takes text.
    scalars = types if types - {Mapping} <= _SCALARS.keys() else set()
    return replace(declared, name=name, types=frozenset(scalars), optional=NoneType in members)


def check_options(config: Any) -> None:
    """Check every option of `config` on its own."""
    for declared in options_of(type(config)):
        declared.check_value(getattr(config, declared.name))


MAX_LISTED = 20  # An error lists no more options than these.

# Options of vLLM with a fixed behaviour in this engine: the accepted values, and why others are refused.
FIXED_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code that comes with a model is never run"),
    "tensor_parallel_size": ((1,), "one device per engine"),
    "pipeline_parallel_size": ((1,), "one device per engine"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked to the step's budget"),
    "tokenizer_mode": (("auto",), "the tokenizer is the model's own"),
}


def translate_options(given: Mapping[str, Any], options: tuple[Option, ...]) -> dict[str, Any]:
    """Return the given values by the options' own names."""
    names = {name: option.name for option in options for name in (option.name, *option.aliases)}
    opposites = {name: option.name for option in options for name in option.opposite_aliases}
    translated: dict[str, Any] = {}
    for name, value in given.items():
        if name in FIXED_OPTIONS:
            allowed, reason = FIXED_OPTIONS[name]
            if value not in allowed:
                raise InvalidParameter(name, f"{value!r} is not supported: {reason}")
            continue
        if name in opposites:
            if not isinstance(value, bool):
                raise InvalidParameter(name, f"must be true or false, got {value!r}")
            own, value = opposites[name], not value
        elif name in names:
            own = names[name]
        else:
            close = get_close_matches(name, [*names, *opposites, *FIXED_OPTIONS], 1, 0.75)
            known = f"choose from {', '.join(option.name for option in options)}"
            if len(options) > MAX_LISTED:
                known = "docs/options.md lists all"
            raise InvalidParameter(name, f"is not an option; {f'did you mean {close[0]}?' if close else known}")
        if own in translated:
            raise InvalidParameter(name, f"{own} is given twice")
        translated[own] = value
    return translated


def alias_flags(options: tuple[Option, ...]) -> dict[str, str]:
    """Return the flags of aliases and the flag that each stands for: max-num-seqs -> max-batch-requests."""
    flags: dict[str, str] = {}
    for option in options:
        own = option.long_flag.removeprefix("--")
        flags |= {alias.replace("_", "-"): own for alias in option.aliases}
        flags |= {alias.replace("_", "-"): f"no-{own}" for alias in option.opposite_aliases}
    return flags


# ---- files that options name: YAML or TOML with options, and others ----------------------------------------------

MAPPING_SUFFIXES = frozenset({".toml", ".yaml", ".yml"})

MAX_MIB = 16  # The limit of a file that an option names.

_PARAMETER = "config"


def read_config_file(path: Path, options: tuple[Option, ...]) -> dict[str, Any]:
    """The checked values in a file, by option name. Its keys are option names or aliases, with - or _ between words."""
    parsed = read_mapping(path, _PARAMETER)
    try:
        values = translate_options(_with_underscores(parsed), options)
        for option in options:
            if option.name in values:
                if option.kind is Path and isinstance(values[option.name], str):
                    values[option.name] = Path(values[option.name])
                option.check_value(values[option.name])
    except InvalidParameter as error:
        raise InvalidParameter(_PARAMETER, f"{path}: {error}") from None
    return values


def _with_underscores(parsed: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in parsed.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise InvalidParameter(name, "is given twice")
        values[name] = value
    return values


def read_text(path: Path, parameter: str, max_mib: int = MAX_MIB) -> str:
    """Return the text of a file; errors name `parameter`. A device, which may never end, is not read for ever."""
    try:
        with path.open("rb") as file:
            data = file.read(max_mib * 2**20 + 1)
        if len(data) > max_mib * 2**20:
            raise InvalidParameter(parameter, f"{str(path)!r} is larger than {max_mib} MiB")
        return data.decode().replace("\r\n", "\n")
    except OSError as error:
        raise InvalidParameter(parameter, f"cannot read {str(path)!r} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InvalidParameter(parameter, f"cannot read {str(path)!r}: it is not text in UTF-8") from None


def read_mapping(path: Path, parameter: str) -> Mapping[str, Any]:
    """Return what a YAML or TOML file holds; errors name `parameter`."""
    text = read_text(path, parameter)
    match path.suffix.lower():
        case ".toml":
            parsed = _parse_toml(path, text, parameter)
        case ".yaml" | ".yml":
            parsed = _parse_yaml(path, text, parameter)
        case _:
            raise InvalidParameter(parameter, f"{str(path)!r} must end in .yaml, .yml or .toml")
    if parsed is None:  # an empty YAML file
        return {}
    if not isinstance(parsed, Mapping):
        raise InvalidParameter(parameter, f"{path}: must map names to values")
    return parsed


def _parse_toml(path: Path, text: str, parameter: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameter(parameter, f"{path}: is not TOML ({error})") from None


def _parse_yaml(path: Path, text: str, parameter: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InvalidParameter(parameter, f"{path}: is not YAML ({problem})") from None


# ---- amounts of memory as text ------------------------------------------------------------------------------------

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(parameter: str, value: int | str) -> int:
    """1073741824, "1GiB", "1.5 GB", "512M" -> bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        if not match:
            raise InvalidParameter(parameter, f"must be a number of bytes such as 1073741824 or '1GiB', got {value!r}")
        amount = int(float(match[1]) * _UNITS[match[2] or ""])
    if amount <= 0:
        raise InvalidParameter(parameter, f"must be positive, got {value!r}")
    return amount


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
