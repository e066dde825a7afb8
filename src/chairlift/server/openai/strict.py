"""The base class of all request bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

MAX_PARAMETERS = 256


def max_entries(limit: int) -> BeforeValidator:
    """Limit the entries of an object before validation: formatting half a million errors takes seconds. (Lists have
    `fail_fast` for that.)"""
    return BeforeValidator(lambda data: _check_count(data, limit, "entries"))


def _check_count(data: Any, limit: int, what: str) -> Any:
    if isinstance(data, dict) and len(data) > limit:
        raise ValueError(f"has {len(data)} {what}; the limit is {limit}")
    return data


class StrictModel(BaseModel):
    """A model without type coercion ("3" is not 3) that refuses unknown parameters."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _limit_parameters(cls, data: Any) -> Any:
        return _check_count(data, MAX_PARAMETERS, "parameters")
