"""Links and file names in the documentation point at things that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Git hosts make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


DESCRIBING = [page for page in PAGES if page.parent.name != "extending"]  # those also name files to be written


@pytest.mark.parametrize("page", DESCRIBING, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_source_files_exist(page: Path) -> None:
    """A path in backticks with a folder and a suffix is a file of the package, the tests, or the repository."""
    for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|js))(?::\w+)?`", page.read_text()):
        places = (ROOT / name, ROOT / "src" / name, ROOT / "src" / "chairlift" / name, page.parent / name)
        assert any(place.exists() for place in places), name


RECORDS = [path for path in (ROOT / "docs" / "results").glob("*.json") if not path.stem.startswith("gpu-h200")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    sections = json.loads(path.read_text())["sections"]
    assert sections
    for section in sections:
        assert section["title"]
        assert section["commit"]
        assert section["machine"]
        assert all(len(row) == len(table["columns"]) for table in section["tables"] for row in table["rows"])
