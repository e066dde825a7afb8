"""Workloads: repeatable, within their bounds, and readable from a file."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift_lab.common.workload import LengthRange, Workload, load_workload, make_workload, text_like_ids
from tests.tiny import byte_level_tokenizer

VOCABULARY = list(range(10, 60))


def make(seed: int = 0, requests: int = 20) -> Workload:
    return make_workload(
        VOCABULARY, requests=requests, prompt_len=LengthRange(16, 512), output_len=LengthRange(4, 9), seed=seed
    )


def test_the_same_seed_gives_the_same_workload() -> None:
    assert make(seed=3) == make(seed=3)
    assert make(seed=3) != make(seed=4)


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 30))
def test_lengths_and_ids_stay_within_their_bounds(seed: int, requests: int) -> None:
    workload = make(seed, requests)
    assert len(workload.requests) == requests
    for request in workload.requests:
        assert 16 <= len(request.prompt_ids) <= 512
        assert 4 <= request.n_out <= 9
        assert set(request.prompt_ids) <= set(VOCABULARY)
    assert workload.input_tokens == sum(len(request.prompt_ids) for request in workload.requests)
    assert workload.longest <= 512 + 9


@given(low=st.integers(1, 1000), more=st.integers(0, 1000), seed=st.integers(0, 2**32))
def test_draws_stay_within_any_range(low: int, more: int, seed: int) -> None:
    assert low <= LengthRange(low, low + more).draw(random.Random(seed)) <= low + more


def test_draws_are_log_uniform() -> None:
    source = random.Random(0)
    draws = [LengthRange(16, 511).draw(source) for _ in range(5000)]
    octaves = Counter(length.bit_length() for length in draws)  # 16-31, 32-63, …, 256-511
    assert set(octaves) == {5, 6, 7, 8, 9}
    assert max(octaves.values()) < 1.15 * min(octaves.values())
    assert min(draws) == 16


def test_both_ends_of_a_range_are_drawn() -> None:
    source = random.Random(0)
    assert {LengthRange(3, 5).draw(source) for _ in range(200)} == {3, 4, 5}


def test_a_warm_up_shares_no_prefix_with_the_workload() -> None:
    workload = make()
    warm_up = workload.warm_up()
    assert 1 <= len(warm_up.requests) <= 4
    assert max(request.n_out for request in warm_up.requests) <= 8
    starts = {request.prompt_ids[:16] for request in workload.requests}
    assert not starts & {request.prompt_ids[:16] for request in warm_up.requests}


def test_ranges_are_parsed() -> None:
    assert LengthRange.parse("prompt_len", "16:512") == LengthRange(16, 512)
    assert LengthRange.parse("prompt_len", "128") == LengthRange(128, 128)
    assert str(LengthRange(16, 512)) == "16:512"


@pytest.mark.parametrize("text", ["", ":", "a:b", "16:", "9:3", "0:4", "-4:4", "1:2:3", "1.5"])
def test_a_bad_range_names_its_parameter(text: str) -> None:
    with pytest.raises(InvalidParameter, match="prompt_len: must"):
        LengthRange.parse("prompt_len", text)


def test_text_like_ids_are_words_without_control_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    ids = text_like_ids(tokenizer)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    assert len(ids) > 50
    assert all(text.strip().isalpha() for text in texts)
    assert not {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} & set(texts)
    assert any(text.startswith(" ") for text in texts)


def test_a_workload_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "workload.json"
    requests = [{"id": 0, "prompt_ids": [5, 6, 7], "n_prompt": 3, "n_out": 4}, {"prompt_ids": [8], "n_out": 1}]
    file.write_text(json.dumps({"seed": 1, "requests": requests}))
    workload = load_workload(file)
    assert [request.prompt_ids for request in workload.requests] == [(5, 6, 7), (8,)]
    assert [request.n_out for request in workload.requests] == [4, 1]
    assert (workload.input_tokens, workload.output_tokens, workload.longest) == (4, 5, 7)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"requests": []}',
        '{"requests": [7]}',
        '{"requests": [{"prompt_ids": [], "n_out": 1}]}',
        '{"requests": [{"prompt_ids": [1.5], "n_out": 1}]}',
        '{"requests": [{"prompt_ids": [-1], "n_out": 1}]}',
        '{"requests": [{"prompt_ids": [1], "n_out": 0}]}',
        '{"requests": [{"prompt_ids": [1]}]}',
    ],
)
def test_a_bad_workload_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "workload.json"
    file.write_text(content)
    with pytest.raises(InvalidParameter, match="workload: "):
        load_workload(file)


def test_a_missing_workload_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="workload: cannot read"):
        load_workload(tmp_path / "nowhere.json")
