"""Helpers for the tests of docs/extending: each page shows the whole text of a toy file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chairlift.registry import Registry

TOYS = Path(__file__).parent / "toys"
PAGES = Path(__file__).parents[2] / "docs" / "extending"


def load_toy(monkeypatch: pytest.MonkeyPatch, registry: Registry[Any], toy: str) -> ModuleType:
    """Import a toy file; what it adds to `registry` is gone after the test."""
    for name in registry.names():
        registry.get(name)  # a module registers its choice once, which must not be in the copy that is dropped
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    spec = spec_from_file_location(f"toy_{Path(toy).stem}", TOYS / toy)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_shows(page: str, toy: str) -> bool:
    """Whether the page contains the toy file as one code block."""
    return f"```python\n{(TOYS / toy).read_text()}```\n" in (PAGES / page).read_text()


def missing_on(page: str, members: Iterable[str]) -> list[str]:
    """The members of an interface that the page does not name within backticks, outside of its example."""
    spans = " ".join(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (PAGES / page).read_text()))
    return [member for member in members if not re.search(rf"\b{member}\b", spans)]


def public(*classes: type) -> list[str]:
    """The public members that the classes themselves declare."""
    return [name for each in classes for name in {**vars(each), **each.__annotations__} if not name.startswith("_")]


def run_with_plugin(toy: str, program: str, *arguments: str) -> str:
    """Run a Python program in a process of its own with the toy as a plugin; return what it printed."""
    environment = {**os.environ, "CHAIRLIFT_PLUGINS": str(TOYS / toy)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
