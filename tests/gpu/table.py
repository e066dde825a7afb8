"""Tables of the figures that tests record with `record_property`."""

from __future__ import annotations

from collections.abc import Sequence

TITLES = {
    "greedy": "Greedy tokens against transformers, float32",
    "rounding": "Greedy tokens against transformers in short types: every difference is a near-tie",
    "fp8": "8-bit floats against bfloat16",
}


def show(recorded: Sequence[tuple[str, object]]) -> list[str]:
    """Lines of one table per kind; `recorded` holds (kind, {column: value}) in any order."""
    lines = []
    for kind, title in TITLES.items():
        rows = sorted(
            (row for name, row in recorded if name == kind and isinstance(row, dict)), key=lambda row: row["model"]
        )
        if rows:
            cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines += ["", title]
            lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    return lines
