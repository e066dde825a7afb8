"""What shape a request's text must have. The brain only carries it; a grammar engine enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StructureKind(StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    JSON_SCHEMA = "json_schema"  # `text` is a JSON schema, as JSON
    REGEX = "regex"  # `text` is a regular expression for the whole answer
    CHOICE = "choice"  # `text` is a JSON list of strings, one of which is the answer
    GRAMMAR = "grammar"  # `text` is a grammar in llguidance's Lark dialect


@dataclass(frozen=True, slots=True)
class Structure:
    kind: StructureKind
    text: str = ""
