"""Stop strings against a search of the whole text, for every way to cut it into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.text.stop_strings import StopStrings


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search ever longer prefixes of the text for one that ends with a stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    return max((len(start) for start in beginnings if text.endswith(start)), default=0)


letters = st.text(alphabet="ab", max_size=30)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    search = StopStrings(tuple(stops), include)
    shown, seen, found = "", "", None
    for piece in pieces:
        text, found = search.push(piece)
        shown += text
        if found is not None:
            break
        seen += piece
        assert len(seen) - len(shown) == held_back(seen, stops)
    shown += search.flush()
    assert (shown, found) == expected("".join(pieces), stops, include)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (("bc", "abcd"), "xabcd", "xa", "bc"),  # complete first
        (("c", "abc", "bc"), "xabc", "x", "abc"),  # complete together: the longest
        (("\n\n",), "a\n\nb", "a", "\n\n"),
        (("aab",), "aaaab", "aa", "aab"),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stops: tuple[str, ...], text: str, shown: str, found: str) -> None:
    assert StopStrings(stops, include=False).push(text) == (shown, found)
    by_character = StopStrings(stops, include=False)
    assert "".join(by_character.push(character)[0] for character in text) == shown


def test_text_after_the_stop_string_is_dropped() -> None:
    search = StopStrings(("END",), include=True)
    assert search.push("the END of") == ("the END", "END")
    assert search.push(" it") == ("", "END")
    assert search.flush() == ""


def test_text_held_back_is_shown_at_the_end() -> None:
    search = StopStrings(("</s>",), include=False)
    assert search.push("a </") == ("a ", None)
    assert search.flush() == "</"
