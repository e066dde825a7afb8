"""Files that options name: YAML or TOML with options, and others."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.options.declaration import Option, translate_options

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
    found: dict[str, Any] = {}
    for key, value in parsed.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise InvalidParameter(name, "is given twice")
        found[name] = value
    return found


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
