"""docs/architecture.md tells the truth: its module tree, its layers and its walks are those of the code."""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "chairlift"
LABORATORY = ROOT / "src" / "chairlift_lab"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST_MODULES = 17  # in one folder
MOST_AT_THE_TOP = 12


def section(title: str) -> str:
    """The text of one section of the page."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def code_block(title: str) -> list[str]:
    """The lines of a section's first code block."""
    return section(title).split("```")[1].splitlines()[1:]


def documented_tree() -> dict[str, set[str]]:
    """The children of each top-level package in the page's tree, and those of chairlift itself under ''."""
    tree: dict[str, set[str]] = {"": set()}
    package = ""
    for line in code_block("Module tree"):
        words = line.split()
        if line.startswith("chairlift_lab/ "):
            package = "chairlift_lab"
            tree[package] = set(words[1:])
            continue
        if not words or words == ["chairlift/"]:
            continue
        if re.match(r"  \S+/ ", line):
            package = words.pop(0).rstrip("/")
            tree[package] = set()
        tree[package].update(words)
    return tree


def children(folder: Path) -> set[str]:
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    return modules | {f"{path.name}/" for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}


def test_the_module_tree_is_that_of_the_code() -> None:
    packages = [path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    actual = {path.name: children(path) for path in packages}
    actual["chairlift_lab"] = children(LABORATORY)
    actual[""] = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert documented_tree() == actual


def test_no_folder_is_crowded() -> None:
    assert len([path for path in PACKAGE.glob("*.py") if path.stem != "__init__"]) <= MOST_AT_THE_TOP
    crowded = {
        str(folder.relative_to(PACKAGE)): count
        for folder in PACKAGE.rglob("*")
        if folder.is_dir()
        and (count := len([path for path in folder.glob("*.py") if path.stem != "__init__"])) > MOST_MODULES
    }
    assert crowded == {}


def linted_layers() -> list[list[str]]:
    """The layers of .importlinter from the top, which lint-imports (part of `make test`) enforces."""
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip().removeprefix("chairlift.") for name in line.split("|")] for line in lines if line.strip()]


def test_the_layers_are_those_that_the_linter_enforces() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", section("Layers"), re.MULTILINE)
    assert [re.findall(r"`([\w.]+)`", row) for row in rows] == linted_layers()


def test_every_package_has_a_layer() -> None:
    layered = {name.split(".")[0] for names in linted_layers() for name in names}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages - layered == set()


def walk(title: str) -> list[tuple[str, str]]:
    """The (module, qualified name) of each step of a walk."""
    return re.findall(r"`([\w.]+):([\w.]+)`", section(title))


WALKS = ("The walk of a request", "The walk of a step", "The walk of a weight")


@pytest.mark.parametrize("title", WALKS)
def test_every_name_of_a_walk_exists(title: str) -> None:
    steps = walk(title)
    assert len(steps) >= 6
    for module, name in steps:
        found: object = import_module(f"chairlift.{module}")
        for part in name.split("."):
            found = getattr(found, part)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_enters_each_module_once(title: str) -> None:
    modules = [module for module, _ in walk(title)]
    visits = [module for index, module in enumerate(modules) if index == 0 or modules[index - 1] != module]
    assert len(visits) == len(set(visits)), [module for module in set(visits) if visits.count(module) > 1]


def own_imports(path: Path) -> set[str]:
    """Modules of ours that a module imports at its top level, also for the type checker only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chairlift"):
            found.add(node.module or "")
    return found


def test_the_core_has_no_import_cycle() -> None:
    """Imports for the type checker count: modules that only know each other by type are a cycle for a reader, too."""
    graph: dict[str, set[str]] = {}
    for path in (PACKAGE / "core").rglob("*.py"):
        if path.stem != "__init__":
            graph[".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts)] = own_imports(path)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in graph and module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
