"""The JSON that every bench writes; docs/bench-json.md explains its keys."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from chairlift import __version__
from chairlift.errors import InvalidParameter


def write_report(
    path: Path, bench: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write the report of `bench` and return it.

    The shape is the same for all benches:

    | key | meaning |
    |---|---|
    | `bench` | which one |
    | `machine` | where it ran, see `machine` |
    | `settings` | the settings, with defaults |
    | `rows` | one object for each engine or setting compared, with a `name` |
    """
    report = {"bench": bench, "machine": machine(), "settings": dict(settings), "rows": [dict(row) for row in rows]}
    try:
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter("json", f"cannot write {str(path)!r} ({error.strerror})") from None
    return report


def check_writable(path: Path, parameter: str = "json") -> None:
    """Raise before the measurement if the file cannot be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidParameter(parameter, f"cannot write {str(path)!r}; give a file in a folder that you may write to")


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "chairlift": __version__,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    parts = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB",
        facts["gpu"] or "no GPU",
        f"Python {facts['python']}",
        f"torch {facts['torch']}",
        f"transformers {facts['transformers']}",
        f"chairlift {facts['chairlift']}",
    ]
    return " · ".join(parts)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
