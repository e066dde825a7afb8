"""The page's scripts, without a browser."""

from __future__ import annotations

import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from chairlift.server.dashboard.page import joined_modules
from tests.tools import require_tool

WEB = Path(str(files("chairlift.server.dashboard"))) / "web"
SCRIPTS = sorted(path.name for path in WEB.glob("*.js"))


def check_syntax(path: Path) -> None:
    done = subprocess.run([require_tool("node"), "--check", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_a_valid_module(name: str, tmp_path: Path) -> None:
    module = tmp_path / f"{name.removesuffix('.js')}.mjs"  # node loads .mjs files as modules
    module.write_text((WEB / name).read_text(encoding="utf-8"))
    check_syntax(module)


@pytest.mark.parametrize("entry", ["main", "fleet"])
def test_the_joined_script_is_a_valid_module(tmp_path: Path, entry: str) -> None:
    script = tmp_path / "page.mjs"
    script.write_text(joined_modules(entry))
    check_syntax(script)


def test_every_script_is_part_of_a_page() -> None:
    joined = joined_modules("main") + joined_modules("fleet")
    assert [name for name in SCRIPTS if f"// ---- {name}" not in joined] == []
