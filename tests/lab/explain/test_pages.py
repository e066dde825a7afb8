"""Files, pages and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.errors import InvalidParameter
from chairlift_lab.explain import guide
from chairlift_lab.explain.drawing import look_of
from chairlift_lab.explain.guide import neighbours, to_markdown
from chairlift_lab.explain.recording import as_label


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_topic_is_written_in_every_format(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "guide"
    formats = "png,svg,json,md"
    code, said = explain("budget", "--out", str(out), "--model", str(tiny_folder), "--formats", formats)
    assert code == 0, said
    names = {f"budget.{suffix}" for suffix in formats.split(",")}
    assert {path.name for path in out.iterdir()} == names
    assert all(name in said for name in names)
    assert (out / "budget.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "budget.svg").read_text()
    markdown = (out / "budget.md").read_text()
    assert re.search(r"!\[The tokens of .*\]\(budget.png\)\n\n```bash\nchairlift explain budget", markdown)
    written = json.loads((out / "budget.json").read_text())
    tokens = sum(e["decode_tokens"] for e in written["data"]["run"]["events"] if e["type"] == "StepDone")
    assert written["drawn"]["budget"]["steps"]["decode"] == tokens > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["weather"], [*guide.TOPICS, "all", "weather"]),
        (["budget", "--formats", "png,gif"], ["--formats", "gif", "svg"]),
        (["budget", "--formats", "html"], ["--formats", "html", "md"]),
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
    for name in guide.TOPICS:
        topic = guide.topic_named(name)
        assert topic.name == name
        assert topic.title
        assert topic.question.endswith("?")
        assert topic.pictures
        sources = re.findall(r"`(chairlift/[\w/]+\.py)`", topic.text)
        assert sources
        assert all(Path("src", source).is_file() for source in sources if Path("src").is_dir())
    with pytest.raises(InvalidParameter, match="choose from attention"):
        guide.topic_named("")


def test_the_guide_in_docs_has_every_topic_with_its_pictures_and_command() -> None:
    folder = Path(__file__).parents[3] / "docs" / "guide"
    index = (folder / "README.md").read_text()
    for name in guide.TOPICS:
        topic = guide.topic_named(name)
        page = (folder / f"{name}.md").read_text()
        assert f"({name}.md)" in index
        assert page.count(topic.command) == len(topic.pictures)
        for picture in topic.pictures:
            assert f"]({picture}.png)" in page
            assert (folder / f"{picture}.png").is_file()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000


def test_an_unknown_kind_is_not_drawn_by_accident() -> None:
    with pytest.raises(InvalidParameter, match=r"known: .*prefill"):
        look_of("something")


def test_pages_are_wrapped_again_after_figures_were_filled_in() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    text = f"A **b** `c < d`.\n\n## T\n\n1. one\n   more\n2. two\n\n- x\n\n{table}\n\n![pic](pic.png)"
    markdown = to_markdown(text, "draw it")
    assert "1. one more\n2. two\n\n- x" in markdown
    assert markdown.endswith("| 1 | 2 |\n\n![pic](pic.png)\n\n```bash\ndraw it\n```")
    long = to_markdown("- " + "word " * 50, "")
    assert all(len(line) <= 120 for line in long.splitlines())
    assert long.splitlines()[1].startswith("  word")


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" cat", "cat"), ("$x", r"\$x"), (" ", "␣"), ("\n", "⏎"), ("\x07", "·"), ("\ufffd", "·"), ("", "␣")],
)
def test_labels_show_any_token(text: str, shown: str) -> None:
    assert as_label(text) == shown


def test_pages_lead_to_their_neighbours() -> None:
    first, second, *_ = (guide.topic_named(name) for name in guide.TOPICS)
    assert neighbours(first) == (None, second)
    assert neighbours(guide.topic_named(list(guide.TOPICS)[-1]))[1] is None


@pytest.mark.slow
def test_one_command_writes_the_whole_guide(tiny_folder: Path, tmp_path: Path) -> None:
    code, said = explain("all", "--out", str(tmp_path), "--model", str(tiny_folder), "--formats", "png,json,md")
    assert code == 0, said
    index = (tmp_path / "README.md").read_text()
    for name in guide.TOPICS:
        assert (tmp_path / f"{name}.md").is_file()
        assert json.loads((tmp_path / f"{name}.json").read_text())["drawn"]
        assert f"({name}.md)" in index
        for picture in guide.topic_named(name).pictures:
            assert (tmp_path / f"{picture}.png").is_file()
