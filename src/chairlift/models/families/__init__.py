"""The model families: one file of differences from Llama for each kind of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.models.families.base import Family
from chairlift.registry import load_plugins

__all__ = ["FAMILIES", "Family", "find_family"]

# By the model_type of config.json. A plugin adds its own: FAMILIES["name"] = Family(...).
FAMILIES: dict[str, Family] = {}
# Families that only exist as the text part of a larger model.
TEXT_PARTS: dict[str, Family] = {}
# Model types that are another name of a family: transformers does not have them, or not as language models.
SAME_AS: dict[str, str] = {}


def find_family(model_type: object) -> Family | None:
    """The family of this name, also from plugins."""
    load_plugins()
    name = SAME_AS.get(str(model_type), str(model_type))
    return FAMILIES.get(name) or TEXT_PARTS.get(name)


def _read(path: Path) -> None:
    """Add the families of a file. A table may be `like` an earlier one; what only others are like has a name with _."""
    tables = tomllib.loads(path.read_text())
    SAME_AS.update(tables.pop("same_as", {}))
    for name, table in tables.items():
        if "like" in table:
            tables[name] = table = _merged(tables[table.pop("like")], table)
        if not name.startswith("_"):
            own = {key: value for key, value in table.items() if key != "text_part"}
            (TEXT_PARTS if "text_part" in table else FAMILIES)[name] = Family.of(own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, and in tables that both have those of both; `own` counts."""
    both = {name: _merged(base[name], own[name]) for name in base.keys() & own.keys() if isinstance(own[name], dict)}
    return {**base, **own, **both}


for _path in sorted(Path(__file__).parent.glob("*.toml")):
    _read(_path)
