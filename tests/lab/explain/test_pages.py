"""Files, pages and the command."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.explain import registry
from chairlift_lab.explain.page import index_page
from chairlift_lab.explain.palette import LIGHT
from chairlift_lab.explain.topic_engines import as_label
from chairlift_lab.explain.words import to_html, to_markdown
from chairlift_lab.explain.write import neighbours


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_topic_is_written_in_every_format(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "guide"
    formats = "png,svg,html,json,md"
    code, said = explain("budget", "--out", str(out), "--model", str(tiny_folder), "--formats", formats)
    assert code == 0, said
    names = {f"budget.{suffix}" for suffix in formats.split(",")}
    assert {path.name for path in out.iterdir()} == names
    assert all(name in said for name in names)
    assert (out / "budget.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "budget.svg").read_text()
    markdown = (out / "budget.md").read_text()
    assert re.search(r"!\[The tokens of .*\]\(budget.png\)\n\n```\nchairlift explain budget", markdown)
    written = json.loads((out / "budget.json").read_text())
    tokens = sum(e["decode_tokens"] for e in written["data"]["run"]["events"] if e["type"] == "StepDone")
    assert written["drawn"]["budget"]["steps"]["decode"] == tokens > 0
    _check_page((out / "budget.html").read_text(), pictures=1)


def _check_page(text: str, pictures: int) -> None:
    page = Page(text)
    images = page.all("img")
    assert [image["class"] for image in images] == ["light", "dark"] * pictures
    assert all(image["alt"] and (image["src"] or "").startswith("data:image/png;base64,") for image in images)
    assert not page.all("link")
    assert not any("src" in attributes for attributes in page.all("script"))
    assert "prefers-color-scheme:dark" in text
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text), "nothing is fetched from anywhere"
    assert page.all("html") == [{"lang": "en"}]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["weather"], [*registry.TOPICS, "all", "weather"]),
        (["budget", "--formats", "png,gif"], ["--formats", "gif", "svg"]),
        (["budget", "--formats", ","], ["--formats"]),
        (["budget", "--model", "no/such/folder/at/all"], ["no/such/folder"]),
    ],
)
def test_unknown_topics_and_formats_are_refused(arguments: list[str], named: list[str], tmp_path: Path) -> None:
    code, said = explain(*arguments, "--out", str(tmp_path / "guide"))
    assert code == 2
    assert all(name in said for name in named)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = explain("budget", "--out", str(tmp_path / "file" / "guide"))
    assert code == 2
    assert "--out" in said


def test_every_topic_is_complete() -> None:
    for name in registry.TOPICS:
        topic = registry.topic_named(name)
        assert topic.name == name
        assert topic.title
        assert topic.question.endswith("?")
        assert topic.pictures
        assert all(Path("src", place).is_file() for place in topic.code if Path("src").is_dir())
    with pytest.raises(InvalidParameter, match="choose from attention"):
        registry.topic_named("")


def test_the_guide_in_docs_has_every_topic_with_its_pictures_and_command() -> None:
    folder = Path(__file__).parents[3] / "docs" / "guide"
    index = (folder / "README.md").read_text()
    for name in registry.TOPICS:
        topic = registry.topic_named(name)
        page = (folder / f"{name}.md").read_text()
        assert f"({name}.md)" in index
        assert page.count(topic.command) == len(topic.pictures)
        for picture in topic.pictures:
            assert f"]({picture.name}.png)" in page
            assert (folder / f"{picture.name}.png").is_file()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000


def test_an_unknown_kind_is_not_drawn_by_accident() -> None:
    with pytest.raises(InvalidParameter, match=r"known: .*prefill"):
        LIGHT.look("something")


def test_markdown_becomes_html() -> None:
    text = "A **b** `c < d`.\n\n## T\n\n1. one\n   more\n2. two\n\n- x\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n[[pic]]"
    html = to_html(text, lambda name: f"<{name}>")
    assert html == (
        "<p>A <strong>b</strong> <code>c &lt; d</code>.</p>\n<h2>T</h2>\n<ol><li>one more</li><li>two</li></ol>\n"
        '<ul><li>x</li></ul>\n<div class="wide"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>\n<pic>"
    )
    markdown = to_markdown(text, lambda name: f"({name})")
    assert "1. one more\n2. two\n\n- x" in markdown
    assert markdown.endswith("| 1 | 2 |\n\n(pic)")
    long = to_markdown("- " + "word " * 50, lambda name: "")
    assert all(len(line) <= 120 for line in long.splitlines())
    assert long.splitlines()[1].startswith("  word")


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" cat", "cat"), ("$x", r"\$x"), (" ", "␣"), ("\n", "⏎"), ("\x07", "·"), ("\ufffd", "·"), ("", "␣")],
)
def test_labels_show_any_token(text: str, shown: str) -> None:
    assert as_label(text) == shown


def test_the_first_page_leads_to_every_topic() -> None:
    topics = [registry.topic_named(name) for name in registry.TOPICS]
    images = {topic.name: {"light": b"x", "dark": b"y"} for topic in topics}
    page = Page(index_page(topics, images, "some-model"))
    assert [link["href"] for link in page.all("a")] == [f"{name}.html" for name in registry.TOPICS]
    assert len(page.all("img")) == 2 * len(topics)


def test_pages_lead_to_their_neighbours() -> None:
    first, second, *_ = (registry.topic_named(name) for name in registry.TOPICS)
    assert neighbours(first) == (None, second)
    assert neighbours(registry.topic_named(registry.TOPICS[-1]))[1] is None


@pytest.mark.slow
def test_one_command_writes_the_whole_guide(tiny_folder: Path, tmp_path: Path) -> None:
    code, said = explain("all", "--out", str(tmp_path), "--model", str(tiny_folder), "--formats", "html,json,md")
    assert code == 0, said
    index = Page((tmp_path / "index.html").read_text())
    for link in index.all("a"):
        assert (tmp_path / (link["href"] or "")).is_file()
    for name in registry.TOPICS:
        _check_page((tmp_path / f"{name}.html").read_text(), pictures=len(registry.topic_named(name).pictures))
        assert json.loads((tmp_path / f"{name}.json").read_text())["drawn"]
        assert f"({name}.md)" in (tmp_path / "README.md").read_text()
