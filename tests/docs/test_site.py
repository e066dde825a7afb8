"""`make docs` builds a site from docs/ without a warning, and its pages say what a Git host shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.tools import missing

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    try:
        import material  # noqa: F401
    except ImportError:
        missing("needs mkdocs-material: make install")
    folder = tmp_path_factory.mktemp("site")
    return folder, build(folder)


@pytest.fixture(scope="module")
def site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    folder, done = built
    if done.returncode:
        pytest.skip("the site cannot be built: test_the_site_builds_without_a_warning says why")
    return folder


def test_the_site_builds_without_a_warning(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Each page is in the navigation of mkdocs.yml, and each link and anchor leads somewhere."""
    _, done = built
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


class Shown(HTMLParser):
    """The text of a page, and how many items, cells and blocks of code it has."""

    def __init__(self, article: bool) -> None:
        super().__init__()
        self.on = not article
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.on = self.on or tag == "article"
        if self.on and tag in ("li", "td", "pre", "h2", "h3", "img"):
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.on = self.on and tag != "article"

    def handle_data(self, data: str) -> None:
        self.text += data if self.on else ""

    def words(self) -> str:
        return re.sub(r"[\s¶]", "", self.text)


def shown(html: str, article: bool = False) -> Shown:
    parser = Shown(article)
    parser.feed(html)
    return parser


def address(page: Path) -> Path:
    """The file of a page in the site."""
    name = page.relative_to(ROOT / "docs")
    return name.with_name("index.html") if page.name == "README.md" else name.with_suffix(".html")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_reads_the_same_in_the_site(site: Path, page: Path) -> None:
    """Python-Markdown and Git hosts differ in lists, tables and code; these pages use what both read alike."""
    host = shown(MarkdownIt("commonmark").enable("table").render(page.read_text()))
    here = shown((site / address(page)).read_text(), article=True)
    assert here.tags == host.tags
    assert here.words() == host.words()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*")
    found = {match for page in site.rglob("*.html") for match in loads.findall(page.read_text())}
    assert found == set()


def test_the_search_knows_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {str(address(page)) for page in PAGES} <= pages
    assert "repository/examples/offline.py.html" in pages


@pytest.mark.parametrize("link", ["nowhere.md", "README.md#nowhere", "../nowhere.py"])
def test_a_link_to_nothing_stops_the_build(tmp_path: Path, site: Path, link: str) -> None:
    docs, hooks = tmp_path / "docs", ROOT / "docs" / "site" / "hooks.py"
    docs.mkdir()
    (docs / "README.md").write_text(f"# Page\n\n[there]({link})\n")
    text = re.split(r"^nav:", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(text.replace("docs/site/hooks.py", str(hooks)))
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "nowhere" in done.stderr
