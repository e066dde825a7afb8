"""Validators for the declarations of options."""

from __future__ import annotations

import math
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.options.declaration import Check


def at_least(lowest: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not lowest <= value < math.inf:
            raise InvalidParameter(parameter, f"must be at least {lowest:g}, got {value!r}")

    return check


def above(limit: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not limit < value < math.inf:
            raise InvalidParameter(parameter, f"must be above {limit:g}, got {value!r}")

    return check


def between(lowest: float, highest: float) -> Check:
    """Check that a value lies between two limits, both of which are allowed."""

    def check(parameter: str, value: Any) -> None:
        if not lowest <= value <= highest:
            raise InvalidParameter(parameter, f"must be from {lowest:g} to {highest:g}, got {value!r}")

    return check


def strictly_between(low: float, high: float) -> Check:
    def check(parameter: str, value: Any) -> None:
        if not low < value < high:
            raise InvalidParameter(parameter, f"must be above {low:g} and below {high:g}, got {value!r}")

    return check
