"""Writes docs/models.md: `python -m chairlift_lab.report.models_page docs/models.json > docs/models.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.cli.models import format_count, format_size
from chairlift.loading.known_models import known_models

ALL_SETTINGS = 9
KNOWN = """\
## Models with a short name

For `chairlift run`, `chat`, `serve` and all others that take a MODEL. The first comes from the Python package index,
the others from the Hugging Face hub, where the licence of a gated one must be accepted first (with a token in
`HF_TOKEN`). Weights and memory follow from the published shapes: on a CPU int8, or float32 where a model has experts;
on a GPU the format of the files. The sizes of the files are approximate; those of models that also read images or
sound hold more than is read.
"""


def models_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for results by model type."""
    parts = [Path(__file__).with_suffix(".md").read_text(encoding="utf-8"), _known()]
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


def _known() -> str:
    """The models with a short name."""
    lines = [["name", "model", "weights", "files", "on a CPU", "on a GPU", "context", "licence"], ["---"] * 8]
    for model in known_models():
        sizes = map(format_size, (model.size, model.cpu_bytes, model.gpu_bytes))
        licence = f"{model.licence}, gated" if model.gated else model.licence
        link, context = f"[{model.hub_id}]({model.page})", f"{model.context:,}"
        lines.append([f"`{model.name}`", link, format_count(model.num_parameters), *sizes, context, licence])
    return f"{KNOWN}\n{_table(lines)}"


def _line(name: str, result: Mapping[str, Any]) -> list[str]:
    from chairlift.models.families import FAMILIES

    title = FAMILIES[name].title if name in FAMILIES else ""
    tested = "all" if len(result["features"]) == ALL_SETTINGS else ", ".join(result["features"])
    weights, kv, state = (result.get(key) for key in ("num_parameters", "kv_bytes_per_token", "state_bytes"))
    return [
        f"`{name}`",
        title,
        tested,
        "" if weights is None else format_count(weights),
        "" if kv is None else f"{kv:,}",
        "" if not state else f"{state / 2**20:.1f} MiB",
    ]


def _table(lines: list[list[str]]) -> str:
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


if __name__ == "__main__":
    print(models_page(json.loads(Path(sys.argv[1]).read_text())), end="")
