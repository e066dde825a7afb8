"""Where the reasoning of a completion stands when its generation starts."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    OPEN = "open"  # the prompt has begun the reasoning
    POSSIBLE = "possible"  # the output may begin with reasoning
    CLOSED = "closed"  # the prompt has ended the reasoning, so all output is content
