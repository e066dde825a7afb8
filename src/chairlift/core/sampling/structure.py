"""The structure required of a request's output, as data; `structured/` enforces it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from chairlift.errors import InvalidParameter

MAX_STRUCTURE_LENGTH = 2**17


class StructureKind(StrEnum):
    """The kinds of structure and the meaning of `text` for each."""

    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    JSON_SCHEMA = "json_schema"  # `text` is a JSON schema, as JSON
    REGEX = "regex"  # `text` is a regular expression for the whole output
    CHOICE = "choice"  # `text` is a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # `text` is a grammar in llguidance's Lark dialect, or in GBNF


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint on the output, created by one of the class methods or from a kind and its text.

    >>> SamplingParams(structure=Structure.regex(r"[0-9]{3}-[0-9]{4}"))
    """

    kind: StructureKind
    text: str = ""
    # The parameter of the request that it came from, for error messages; it is ignored in comparisons.
    parameter: str = field(default="structure", compare=False)
    # Lark rules of what precedes the structure in the output, such as reasoning: `before`, and the rules it needs.
    before: str = ""
    # Whether to generate without the structure if it cannot be compiled, instead of refusing the request.
    optional: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, StructureKind):
            raise InvalidParameter(self.parameter, f"kind must be a StructureKind, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidParameter(self.parameter, f"must be given as text, got {type(self.text).__name__}")
        if len(self.text) > MAX_STRUCTURE_LENGTH:
            problem = f"has {len(self.text)} characters; the limit is {MAX_STRUCTURE_LENGTH}"
            raise InvalidParameter(self.parameter, problem)
        if (self.kind is StructureKind.JSON_OBJECT) == bool(self.text):
            problem = "takes no text" if self.text else "is empty"
            raise InvalidParameter(self.parameter, f"a structure of kind {self.kind.value} {problem}")

    @classmethod
    def json_object(cls, parameter: str = "structure") -> Structure:
        """Any JSON object."""
        return cls(StructureKind.JSON_OBJECT, "", parameter)

    @classmethod
    def json(cls, schema: str | Mapping[str, Any] | bool, parameter: str = "structure") -> Structure:
        """JSON that matches a schema, which may be given as JSON text."""
        text = schema if isinstance(schema, str) else _dumps(schema, parameter)
        return cls(StructureKind.JSON_SCHEMA, text, parameter)

    @classmethod
    def regex(cls, pattern: str, parameter: str = "structure") -> Structure:
        """Text that a regular expression matches as a whole."""
        return cls(StructureKind.REGEX, pattern, parameter)

    @classmethod
    def choice(cls, choices: Sequence[str], parameter: str = "structure") -> Structure:
        """One of these strings."""
        return cls(StructureKind.CHOICE, _dumps(list(choices), parameter), parameter)

    @classmethod
    def grammar(cls, grammar: str, parameter: str = "structure") -> Structure:
        """Text that a context-free grammar allows."""
        return cls(StructureKind.GRAMMAR, grammar, parameter)

    def after(self, before: str) -> Structure:
        """The same structure after other output, whose grammar `before` may be empty."""
        return replace(self, before=before)


def _dumps(value: Any, parameter: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(parameter, f"cannot be written as JSON: {error}") from error
