"""Writes docs/models.md: `python -m chairlift_lab.report.models_page docs/models.json > docs/models.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALL_SETTINGS = 9


def models_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for results by model type."""
    parts = [Path(__file__).with_suffix(".md").read_text(encoding="utf-8")]
    for path, title in (("native", "Native families"), ("fallback", "By the fallback")):
        families = {name: each for name, each in results.items() if each["path"] == path}
        lines = [["family", "names", "tested", "weights", "KV bytes per token", "state"], ["---"] * 6]
        lines += [_line(name, each) for name, each in families.items()]
        parts.append(f"## {title}\n\n{len(families)} families.\n\n{_table(lines)}")
    refused = {name: each["reason"] for name, each in results.items() if each["path"] == "refused"}
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    lines = [["reason", "families"], ["---"] * 2, *([reason, ", ".join(names)] for reason, names in reasons.items())]
    return "\n".join([*parts, f"## Refused\n\n{len(refused)} families.\n\n{_table(lines)}"])


def _line(name: str, result: Mapping[str, Any]) -> list[str]:
    from chairlift.models.families import FAMILIES

    title = FAMILIES[name].title if name in FAMILIES else ""
    tested = "all" if len(result["features"]) == ALL_SETTINGS else ", ".join(result["features"])
    weights, kv, state = (result.get(key) for key in ("num_parameters", "kv_bytes_per_token", "state_bytes"))
    return [
        f"`{name}`",
        title,
        tested,
        "" if weights is None else _billions(weights),
        "" if kv is None else f"{kv:,}",
        "" if not state else f"{state / 2**20:.1f} MiB",
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _table(lines: list[list[str]]) -> str:
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


if __name__ == "__main__":
    print(models_page(json.loads(Path(sys.argv[1]).read_text())), end="")
