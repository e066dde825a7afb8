"""Amounts of memory as text: 1GiB, 512M."""

from __future__ import annotations

import re

from chairlift.errors import InvalidParameter

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(parameter: str, value: int | str) -> int:
    """1073741824, "1GiB", "1.5 GB", "512M" -> bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        if not match:
            raise InvalidParameter(parameter, f"must be a number of bytes such as 1073741824 or '1GiB', got {value!r}")
        amount = int(float(match[1]) * _UNITS[match[2] or ""])
    if amount <= 0:
        raise InvalidParameter(parameter, f"must be positive, got {value!r}")
    return amount


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
