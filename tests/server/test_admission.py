"""Admission, refusals, timeouts and limits on bodies."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.events import completion_ids
from chairlift.server.http.bodies import ValueCounter
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Submit, Update
from tests.server.front_end import NAME, FrontEnd, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for

PATH = "/v1/completions"
TEXT_JOBS = [("/tokenize", {"prompt": "a text"}, "encode"), ("/detokenize", {"tokens": [70, 71]}, "decode")]


def post(front: FrontEnd, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(front.url + path, json=body)


@pytest.mark.parametrize(("path", "body", "method"), TEXT_JOBS)
def test_text_jobs_are_limited_and_refused_while_draining(
    path: str, body: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, answers = threading.Event(), list[httpx.Response]()
    with front_end(limits=Limits(max_text_jobs=2)) as front:
        work = getattr(front.service.model.tokenizer, method)

        def slow(*args: Any, **options: Any) -> Any:
            assert go_on.wait(60)
            return work(*args, **options)

        monkeypatch.setattr(front.service.model.tokenizer, method, slow)
        threads = [threading.Thread(target=lambda: answers.append(post(front, path, **body))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: front.service.admission._text_jobs.total == 2, "the text jobs to be admitted")
        refused = post(front, path, **body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        front.service.admission.draining = True
        assert post(front, path, **body).status_code == 503
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200, 200]
        front.service.admission.draining = False
        assert post(front, path, **body).status_code == 200
        assert [front.metric("requests_refused_total", status=status) for status in ("429", "503")] == [1, 1]


def test_a_timeout_counts_from_the_arrival_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with front_end(stay_silent) as front:
        encode, take_your_time = front.service.model.tokenizer.encode, threading.Event()

        def slow(text: str, **options: Any) -> list[int]:
            take_your_time.wait(0.5)
            return encode(text, **options)

        monkeypatch.setattr(front.service.model.tokenizer, "encode", slow)
        late = post(front, PATH, model=NAME, prompt="a", timeout=0.1)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
        assert not front.engine.received
        asking = threading.Thread(target=lambda: post(front, PATH, model=NAME, prompt="b", timeout=600), daemon=True)
        asking.start()
        wait_for(lambda: front.engine.received, "the request to reach the engine")
        submitted = front.engine.received[0]
        assert isinstance(submitted, Submit)
        assert submitted.timeout is not None
        assert 0 < submitted.timeout <= 599.5
        front.engine.publish(Update(submitted.request_id, finish_reason="length"))
        asking.join(30)
        for bad in (0, -1.0):
            refused = post(front, PATH, model=NAME, prompt="a", timeout=bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("search", [{"beam_width": 6}, {"best_of": 6, "n": 2}, {"n": 6}], ids=str)
def test_every_sequence_of_a_search_counts_against_the_queue_limit(search: dict[str, int]) -> None:
    with front_end(stay_silent, limits=Limits(max_waiting=2)) as front:  # 8 slots and a queue of 2
        asking = threading.Thread(target=post, args=(front, PATH), kwargs={"model": NAME, "prompt": "a", **search})
        asking.start()
        wait_for(lambda: front.engine.received, "the search to reach the engine")
        assert front.engine.num_open == 6
        refused = post(front, PATH, model=NAME, prompt="a", **search)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        submitted = front.engine.received[0]
        assert isinstance(submitted, Submit)
        for one_id in completion_ids(submitted.request_id, submitted.params.n):
            front.engine.publish(Update(one_id, finish_reason="length"))
        asking.join(30)
        assert front.engine.num_open == 0


def test_refusals_for_the_size_of_all_bodies_are_counted() -> None:
    with front_end(limits=Limits(max_held_bytes=1000)) as front:
        assert post(front, PATH, model=NAME, prompt="a" * 2000).status_code == 429
        assert front.metric("requests_refused_total", status="429") == 1
        assert post(front, PATH, model=NAME, prompt="a").status_code == 200


def test_a_body_with_too_many_values_is_refused_without_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 8 MiB of small values would block the server for seconds."""
    read = list[int]()
    loads = json.loads

    def watched(text: str | bytes, **options: Any) -> Any:
        read.append(len(text))
        return loads(text, **options)

    with front_end() as front:
        for values in ("[]," * 2_000_000, "1," * 4_000_000):
            with monkeypatch.context() as patch:
                patch.setattr("starlette.requests.json.loads", watched)
                content = f'{{"model": "{NAME}", "prompt": [{values}0]}}'
                answer = HTTP.post(front.url + PATH, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert loads(answer.text)["error"]["code"] == "too_many_values"
            assert not read
        commas = post(front, "/tokenize", prompt="," * 300_000)  # a string is one value
        assert (commas.status_code, commas.json()["count"]) == (200, 300_000)


def test_large_bodies_are_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, loads = list[str](), json.loads

    def watched(text: str | bytes, **options: Any) -> Any:
        readers.append(threading.current_thread().name)
        return loads(text, **options)

    with front_end() as front:
        monkeypatch.setattr("starlette.requests.json.loads", watched)
        large = {"model": NAME, "prompt": [70] * 20_000}
        post(front, PATH, **large)  # too long for the model
        bad = [
            HTTP.post(front.url + PATH, content=text, headers={"content-type": "application/json"})
            for text in (json.dumps(large | {"n": "x"}), json.dumps(large)[:-1], json.dumps([70] * 20_000))
        ]
        assert all(name.startswith("body") for name in readers)
        assert len(readers) == 4
        small = [post(front, PATH, model=NAME, prompt="a", n="x"), post(front, PATH, model=NAME, prompt="a")]
        assert not any(name.startswith("body") for name in readers[4:])
        monkeypatch.undo()
    problems = [loads(answer.text)["error"] for answer in bad]
    assert problems[0] == loads(small[0].text)["error"]
    assert [problem["code"] for problem in problems] == ["invalid_type", "invalid_json", "invalid_type"]
    assert small[1].status_code == 200


json_values = st.recursive(
    st.none() | st.integers() | st.text('a,[{"\\é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a,[{"\\', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def expected_count(value: Any) -> int:
    """The number of values without the outermost one; an empty list counts as one."""
    if isinstance(value, dict):
        value = list(value.values())
    return sum(1 + expected_count(one) for one in value) or 1 if isinstance(value, list) else 0


@given(json_values, st.integers(1, 9), st.booleans())
def test_values_are_counted_regardless_of_strings_and_piece_boundaries(value: Any, size: int, ascii_only: bool) -> None:
    counter, text = ValueCounter(), json.dumps(value, ensure_ascii=ascii_only).encode()
    for start in range(0, len(text), size):
        counter.feed(text[start : start + size])
    assert counter.count == expected_count(value)
