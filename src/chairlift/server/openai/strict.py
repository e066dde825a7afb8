"""What the bodies of all requests have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

MAX_PARAMETERS = 256


def at_most(limit: int) -> BeforeValidator:
    """How many entries an object may have, said before any of them is looked at: each bad one is an error of its own,
    and half a million errors take seconds to write down. (Lists have `fail_fast` for that.)"""
    return BeforeValidator(lambda data: _counted(data, limit, "entries"))


def _counted(data: Any, limit: int, what: str) -> Any:
    if isinstance(data, dict) and len(data) > limit:
        raise ValueError(f"has {len(data)} {what}; the limit is {limit}")
    return data


class Strict(BaseModel):
    # Strict types: "3" is not 3, and a typo is not ignored.
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_parameters(cls, data: Any) -> Any:
        return _counted(data, MAX_PARAMETERS, "parameters")
