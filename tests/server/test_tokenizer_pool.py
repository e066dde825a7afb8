"""Tokenization: after admission, in two pools, cancelled with the client."""

from __future__ import annotations

import json
import threading

import pytest

from chairlift.server.limits import Limits
from chairlift.server.process.messages import Submit
from tests.server.front_end import NAME
from tests.server.running_server import HTTP, wait_for
from tests.server.stuck_tokenizer import LONG_TEXT, PATH, post_prompt, preparing, stuck_on_long_texts


def test_long_texts_do_not_delay_short_ones_and_count_against_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, Limits(max_waiting=0)) as (front, go_on):
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT))) for _ in range(7)]
        for thread in threads:
            thread.start()
        wait_for(lambda: preparing(front) == 7, "the long requests to be admitted")
        assert post_prompt(front, "short") == 200
        assert HTTP.post(front.url + "/tokenize", json={"prompt": "short"}).status_code == 200
        last = threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT)))
        last.start()
        wait_for(lambda: preparing(front) == 8, "the last slot to be reserved")
        assert post_prompt(front, "short") == 429  # before it is tokenized
        go_on.set()
        for thread in (*threads, last):
            thread.join(60)
        assert statuses == [200] * 8
        assert preparing(front) == 0
        assert post_prompt(front, "short") == 200


def test_a_client_that_disconnects_while_its_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, Limits()) as (front, go_on):
        body = json.dumps({"model": NAME, "prompt": LONG_TEXT}).encode()
        connection = front.connect()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        connection.sendall(head.encode() + b"\r\n" + body)
        wait_for(lambda: preparing(front) == 1, "the request to be admitted")
        connection.close()
        wait_for(lambda: preparing(front) == 0, "its reservation to be released")
        go_on.set()
        assert post_prompt(front, "short") == 200
        assert [message.prompt for message in front.engine.received if isinstance(message, Submit)] != [[7]]


def test_an_engine_that_dies_during_tokenization_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.server.process.engine_client import EngineState

    with stuck_on_long_texts(monkeypatch, Limits()) as (front, go_on):
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT)))
        thread.start()
        wait_for(lambda: preparing(front) == 1, "the request to be admitted")
        front.engine.state = EngineState.RESTARTING
        go_on.set()
        thread.join(60)
        assert statuses == [503]
        assert post_prompt(front, "short") == 503
