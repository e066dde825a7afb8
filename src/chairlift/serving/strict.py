"""What the bodies of all requests have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_PARAMETERS = 256


class Strict(BaseModel):
    # Strict types: "3" is not 3, and a typo is not ignored.
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_parameters(cls, data: Any) -> Any:
        """Each unknown parameter is an error of its own; half a million of them take seconds to write down."""
        if isinstance(data, dict) and len(data) > MAX_PARAMETERS:
            raise ValueError(f"has {len(data)} parameters; the limit is {MAX_PARAMETERS}")
        return data
