"""Tables of benches are complete on narrow terminals too."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.cli.models import print_grid
from chairlift.terminal.tables import show_table
from chairlift_lab.bench.quality import CPU_MODES, quality_table
from chairlift_lab.common.verdicts import ClaimsTable, ClaimVerdict, Holds

words = st.text("abcdefgh", min_size=1, max_size=9)
phrases = st.lists(words, min_size=1, max_size=4).map(" ".join)
figures = st.floats(-1e6, 1e6).map("{:,.1f} MB".format)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.integers(1, 7))
    headings = draw(st.lists(phrases, min_size=columns, max_size=columns))
    row = st.tuples(phrases, *[figures] * (columns - 1)).map(list)
    return headings, draw(st.lists(row, max_size=4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(tables(), st.integers(20, 140))
def test_no_word_and_no_figure_is_cut(
    capsys: pytest.CaptureFixture[str], table: tuple[list[str], list[list[str]]], width: int
) -> None:
    headings, rows = table
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        show_table("", headings, rows)
    shown = capsys.readouterr().out
    for row in rows:
        assert all(word in shown for word in row[0].split())
        assert any(all(figure in line for figure in row[1:]) for line in shown.splitlines())
    assert all(word in shown for heading in headings for word in heading.split())
    needed = 3 * len(headings) + 1
    for index, heading in enumerate(headings):
        cells = [row[index] for row in rows]
        needed += max(map(len, [*heading.split(), *(cells if index else " ".join(cells).split())]))
    assert max(map(len, shown.splitlines())) <= max(width, needed)


def test_a_pipe_gets_whole_lines_without_spaces_at_their_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "a folder/" * 30
    show_table("Models", ["Name", "Path"], [["long " * 40 + path, "1"], ["short", "2"]])
    print_grid([("path", path), ("size", "1")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert any(f"long {path}" in line for line in lines)
    assert lines[-2:] == [f"path  {path}", "size  1"]


def test_all_modes_of_bench_quality_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = {"perplexity": 12.345, "perplexity_change": 0.01234, "standard_error": 0.0021, "greedy_agreement": 0.987}
    figures |= {"weight_bytes": 538_060_800, "kv_bytes_per_token": 46_080}
    quality_table("smollm2-135m", [{"name": mode} | figures for mode in CPU_MODES]).show()
    shown = capsys.readouterr().out
    names = " ".join(line[:14].strip() for line in shown.splitlines())  # long ones take two lines
    assert all(mode in " ".join(names.split()) for mode in CPU_MODES)
    assert shown.count("12.345") == shown.count("46,080") == len(CPU_MODES)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_claim_is_shown_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    claim = "continuous batching serves many times as many tokens as static batching"
    verdict = ClaimVerdict(claim, "a paper with a long name", "x" * 30 + " or so" * 20, Holds.PARTLY, "because " * 30)
    ClaimsTable([verdict]).show()
    shown = capsys.readouterr().out
    assert all(word in shown for word in claim.split())
