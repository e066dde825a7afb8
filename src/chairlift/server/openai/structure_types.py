"""Structured output parameters: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.core.sampling.structure import MAX_STRUCTURE_LENGTH, Structure
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import StrictModel

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(fail_fast=True)]


class JSONSchema(StrictModel):
    name: Annotated[str | None, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = None  # OpenAI requires it
    schema_: Annotated[Schema, Field(alias="schema")]
    # Not shown to the model.
    description: Annotated[str | None, Field(max_length=MAX_STRUCTURE_LENGTH)] = None
    strict: bool | None = None  # ignored: the schema is always enforced


class TextFormat(StrictModel):
    type: Literal["text"]

    def structure(self) -> Structure | None:
        return None


class JSONObjectFormat(StrictModel):
    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None  # llama.cpp has it here.

    def structure(self) -> Structure | None:
        if self.schema_ is not None:
            return Structure.json(self.schema_, "response_format.schema")
        return Structure.json_object("response_format")


class JSONSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JSONSchema

    def structure(self) -> Structure | None:
        return Structure.json(self.json_schema.schema_, "response_format.json_schema.schema")


ResponseFormat = Annotated[TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """vLLM's parameter: exactly one of the fields."""

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def structure(self) -> Structure:
        name = "structured_outputs"
        found = [
            *as_structure(Structure.json, self.json_, f"{name}.json"),
            *as_structure(Structure.regex, self.regex, f"{name}.regex"),
            *as_structure(Structure.choice, self.choice, f"{name}.choice"),
            *as_structure(Structure.grammar, self.grammar, f"{name}.grammar"),
            *([Structure.json_object(f"{name}.json_object")] if self.json_object else []),
        ]
        if len(found) != 1:
            raise InvalidParameter(name, "give exactly one of json, regex, choice, grammar and json_object")
        return found[0]


def as_structure(make: Callable[[Any, str], Structure], value: Any, parameter: str) -> list[Structure]:
    """Return the structure that a parameter requests, or an empty list if it is absent."""
    return [] if value is None else [make(value, parameter)]
