"""The advice for options of other engines is that of the page for those who come from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from chairlift.cli.main import app
from chairlift.cli.other_engines import ADVICE
from tests.api.cli_runner import run

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def accepted() -> set[str]:
    """The options of `serve` and `run`, with the names of vLLM that stand for them."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    own = {
        flag
        for name in ("serve", "run")
        for each in commands[name].params
        for flag in (*each.opts, *each.secondary_opts)
    }
    aliases = app.info.context_settings["token_normalize_func"].__closure__[0].cell_contents
    return own | {f"--{alias}" for alias in aliases}


def rows() -> dict[str, set[str]]:
    """The unknown options of the first column, and the options that the second one names for them."""
    found: dict[str, set[str]] = {}
    for theirs, ours in re.findall(r"^\| (`-.*?) \| (.*?) ?\|", PAGE, re.MULTILINE):
        unknown, named = set(FLAG.findall(theirs)) - accepted(), set(FLAG.findall(ours))
        found |= {flag: named if len(named) == 1 else set() for flag in unknown}
    return found


def test_each_row_has_its_advice() -> None:
    table = rows()
    assert len(table) > 40
    assert set(table) == set(ADVICE)
    for flag, named in table.items():
        assert named <= set(FLAG.findall(ADVICE[flag])), flag


def test_advice_names_options_that_exist() -> None:
    of_a_fleet = {"--replicas"}
    assert {flag for text in ADVICE.values() for flag in FLAG.findall(text)} <= accepted() | of_a_fleet


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            ("serve", "m", "--tensor-parallel-size", "2"),
            "--tensor-parallel-size is not supported: a model must fit one GPU",
        ),
        (("serve", "-np", "4"), "-np is --max-batch-requests here"),
        (("run", "m", "--temp=0.5", "hi"), "--temp is --temperature here"),
        (("ps", "--lora"), "no such option: --lora; see"),
    ],
)
def test_an_unknown_option_of_another_engine_is_answered_in_a_line(arguments: tuple[str, ...], advice: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {advice}")
    assert result.stderr.count("\n") == 1
