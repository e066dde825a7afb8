"""The question, the tool and the output type that every client library is tested with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "when does the lift stop?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Lift(BaseModel):
    """Whether a lift runs."""

    # Short enough for a random model to complete.
    open: bool
    side: Literal["north", "south"]


LIFT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "Lift", "description": Lift.__doc__, "parameters": Lift.model_json_schema()},
}
