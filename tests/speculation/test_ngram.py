"""Draft tokens from the request's own text."""

from __future__ import annotations

import pytest

from chairlift.core.request import Request
from chairlift.speculation.proposers import ngram
from chairlift.speculation.proposers.ngram import NgramProposer
from tests.core.driving import make_request
from tests.speculation.drafting import terms

ONE, TWO, FOUR, EIGHT = (level for level in ngram.LEVEL_BY_BITS if level is not None)


def propose(proposer: NgramProposer, request: Request, length: int) -> tuple[list[int], int] | None:
    """The draft tokens, and the level of confidence that all of them have."""
    (draft,) = proposer.propose([request], terms(length))
    if draft is None:
        return None
    assert len({*draft.levels}) == 1
    assert len(draft.levels) == len(draft.tokens)
    return list(draft.tokens), draft.levels[0]


def test_ngrams_propose_what_followed_the_latest_match() -> None:
    request = make_request("a", [1, 2, 3, 4, 5, 6, 9, 3, 4], 20)
    proposer = NgramProposer()
    assert propose(proposer, request, 3) == ([5, 6, 9], TWO)
    request.extend([5, 6])
    assert proposer.expected_level(request) == FOUR
    assert propose(proposer, request, 2) == ([9, 3], FOUR), "asking before has changed nothing"
    request.append(7)
    assert propose(proposer, request, 2) is None
    request.extend([8, 5])
    assert propose(proposer, request, 2) == ([6, 7], ONE), "the latest 5"
    proposer.forget("a")
    assert not proposer._indices


def test_a_match_is_followed_for_as_long_as_it_lasts() -> None:
    """Both copies of 3 4 5 6 are found, the later one first. The text goes on like the earlier one, which is followed
    from there on, although its last four tokens stand at a later position as well."""
    first, second = [30, 31, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 8], [20, 3, 4, 5, 6, 9]
    request = make_request("a", [*first, *second, 1, 2], 30)
    proposer = NgramProposer()
    levels = []
    for token in [3, 4, 5, 6, 7, 8, 3, 4, 5, 6]:
        found = propose(proposer, request, 1)
        assert found is not None
        assert found[0] == [token]
        levels.append(found[1])
        request.append(token)
    assert levels == [TWO, TWO, FOUR, FOUR, FOUR, FOUR, EIGHT, EIGHT, EIGHT, EIGHT]
    assert propose(proposer, request, 1) == ([8], EIGHT), "not the 9 that came last"
    request.append(9)
    assert propose(proposer, request, 3) == ([1, 2, 3], FOUR), "what followed 4 5 6 9"


def test_long_texts_are_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_AT_ONCE", 100)
    proposer, request = NgramProposer(), make_request("a", [1, 2, 3, 4, 5] * 50, 60)
    found = [propose(proposer, request, 5) for _ in range(4)]
    assert found == [None, None, ([1, 2, 3, 4, 5], FOUR), ([1, 2, 3, 4, 5], FOUR)]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_text_that_repeats_itself_is_expected_to_go_on(period: int) -> None:
    request = make_request("a", [i % period for i in range(12)], 10)
    assert propose(NgramProposer(), request, 7) == ([i % period for i in range(12, 19)], FOUR)


def test_an_index_that_grows_step_by_step_equals_one_of_the_whole_text() -> None:
    tokens = [(7 * i * i + 3 * i) % 11 for i in range(200)]
    grown, whole = NgramProposer(), NgramProposer()
    request = make_request("a", tokens[:2], 10)
    for end, step in enumerate([1, 1, 1, 3, 1, 7, 2, 4, 1, 5] * 6):
        request.extend(tokens[request.num_known : request.num_known + step])
        fresh = make_request(f"b{end}", request.tokens, 10)
        grown.propose([request], terms(1))
        whole.propose([fresh], terms(1))
        for name in ("num_indexed", "_behind_long", "_behind_short", "_behind_one"):
            assert getattr(grown._indices["a"], name) == getattr(whole._indices[fresh.id], name)


def test_indexing_in_bulk_finds_the_same_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [(i * i + i // 7) % 13 for i in range(200)]
    found = []
    for few in (0, 1000):
        monkeypatch.setattr(ngram, "FEW", few)
        proposer, request = NgramProposer(), make_request("a", tokens[:100], 100)
        some = []
        for token in tokens[100:190]:
            some.append(propose(proposer, request, 4))
            request.append(token)
        found.append(some)
    assert found[0] == found[1]
