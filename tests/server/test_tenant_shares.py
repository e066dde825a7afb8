"""Tenants have a share of the queue, of the text jobs and of the memory for bodies, which a crowd cannot take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from chairlift.core.events import completion_ids
from chairlift.server.wire.limits import Limits, SharedLimit
from chairlift.server.wire.messages import Cancel, Submit, ToEngine, Update
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for
from tests.server.stuck_tokenizer import LONG_TEXT, preparing, stuck_on_long_texts

PATH = "/v1/completions"
KEYS = ["crowd A", "quiet B", "third C", "fourth D"]
LIMITS = Limits(max_waiting=4)  # and 8 slots


def post(front: FrontEnd, key: str, path: str = PATH, padding: int = 0, **body: Any) -> httpx.Response:
    content = json.dumps({"model": NAME, "prompt": "hello"} | body) + " " * padding
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return HTTP.post(front.url + path, content=content, headers=headers)


class Clients:
    """Clients that wait for their responses in threads."""

    def __init__(self, front: FrontEnd) -> None:
        self.front = front
        self.statuses: dict[str, list[int]] = {}
        self.retry_after: list[str | None] = []
        self._threads: list[threading.Thread] = []

    def send(self, key: str, **body: Any) -> None:
        """Send a request and wait until the engine has it."""
        before = len(submitted(self.front))
        self.send_unsubmitted(key, **body)
        wait_for(lambda: len(submitted(self.front)) > before, "the request to reach the engine")

    def send_unsubmitted(self, key: str, **body: Any) -> None:
        self._threads.append(threading.Thread(target=self._ask, args=(key,), kwargs=body))
        self._threads[-1].start()

    def _ask(self, key: str, **body: Any) -> None:
        answer = post(self.front, key, **body)
        self.statuses.setdefault(key, []).append(answer.status_code)
        if answer.status_code == 429:
            self.retry_after.append(answer.headers.get("retry-after"))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)


def submitted(front: FrontEnd) -> list[Submit]:
    return [message for message in front.engine.received if isinstance(message, Submit)]


def admit(front: FrontEnd, requests: list[Submit]) -> None:
    """Let the engine report that it runs these requests."""
    for request in requests:
        front.engine.publish(Update(request.request_id, cached_tokens=0))
    ids = {request.request_id for request in requests}
    wait_for(
        lambda: not ids & {one for name in ("crowd", "quiet", "third", "fourth") for one in waiting_ids(front, name)},
        "the requests to run",
    )


def waiting_ids(front: FrontEnd, tenant: str) -> list[str]:
    return [stream.ids[0] for stream in front.engine.requests.newest_waiting() if stream.tenant == tenant]


def finish_all(front: FrontEnd) -> None:
    for request in submitted(front):
        for one_id in completion_ids(request.request_id, request.params.n):
            front.engine.publish(Update(one_id, finish_reason="length"))


@contextmanager
def flooded(limits: Limits = LIMITS, **options: Any) -> Iterator[tuple[FrontEnd, Clients]]:
    """A front end whose slots and queue are full of requests of one tenant; the first 8 of them run."""
    with front_end(stay_silent, limits=limits, api_keys=KEYS, **options) as front:
        clients = Clients(front)
        for _ in range(12):
            clients.send("A")
        admit(front, submitted(front)[:8])
        yield front, clients
        finish_all(front)
        clients.join()


def test_a_tenant_below_its_share_displaces_the_newest_waiting_request_of_the_crowd() -> None:
    with flooded() as (front, clients):
        assert post(front, "A").status_code == 429  # the crowd has all of the queue, and no claim to more
        newest = submitted(front)[-1]
        clients.send("B")
        assert front.engine.num_open == 12
        cancelled = [message.request_ids for message in front.engine.received if isinstance(message, Cancel)]
        assert cancelled == [[newest.request_id]]
        wait_for(lambda: clients.statuses.get("A") == [429], "the displaced request to be answered")
        assert clients.retry_after == ["1"]
        assert post(front, "A").status_code == 429
        clients.send("C")
        clients.send("B", n=2)
    assert clients.statuses == {"A": [429] * 4 + [200] * 8, "B": [200] * 2, "C": [200]}
    assert front.metric("requests_total", reason="displaced") == 4
    assert front.metric("requests_refused_total", status="429") == 6
    assert front.engine.num_open == 0


def test_requests_that_run_are_not_displaced() -> None:
    """They may have been preempted and wait again, so the share of others must not depend on what waits."""
    with flooded() as (front, clients):
        admit(front, submitted(front))
        clients.send("B")
        clients.send("B", n=5)
        assert front.engine.requests.sequences_by_tenant == {"crowd": 12, "quiet": 6}
        assert post(front, "B").status_code == post(front, "A").status_code == 429
        admit(front, submitted(front))
        clients.send("C", n=4)
        admit(front, submitted(front))
        clients.send("D", n=2)
        assert front.engine.num_open == 24  # twice the limit
        assert post(front, "D").status_code == 429
    assert clients.statuses == {"A": [200] * 12, "B": [200] * 2, "C": [200], "D": [200]}


def test_a_tenant_displaces_no_more_than_its_share() -> None:
    with flooded(Limits(max_waiting=24)) as (front, clients):  # a share of two tenants is 16
        for _ in range(20):
            clients.send("A")
        for _ in range(16):
            clients.send("B")
        assert post(front, "B").status_code == 429
        assert front.engine.requests.sequences_by_tenant == {"crowd": 16, "quiet": 16}
        clients.send("C")  # displaces one of the larger ones
        assert front.engine.requests.sequences_by_tenant["third"] == 1


def test_shares_follow_the_weights_of_tenants() -> None:
    with flooded(Limits(max_waiting=4, tenant_weights={"crowd": 2.0})) as (front, clients):
        clients.send("B", n=4)
        assert post(front, "B").status_code == 429
        assert front.engine.requests.sequences_by_tenant == {"crowd": 8, "quiet": 4}


def test_requests_that_are_being_tokenized_are_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, LIMITS, api_keys=KEYS) as (front, go_on):
        clients = Clients(front)
        for number in range(12):
            clients.send_unsubmitted("A", prompt=LONG_TEXT)
            wait_for(lambda number=number: preparing(front) == number + 1, "the request to be admitted")
        assert post(front, "B").status_code == 200
        wait_for(lambda: clients.statuses.get("A") == [429], "the displaced request to be answered")
        assert preparing(front) == 11
        go_on.set()
        clients.join()
        assert clients.statuses == {"A": [429] + [200] * 11}


def test_a_stream_that_is_displaced_has_an_error_status() -> None:
    with front_end(stay_silent, limits=LIMITS, api_keys=KEYS) as front:
        clients = Clients(front)
        for _ in range(12):
            clients.send("A", stream=True)
        clients.send("B")
        wait_for(lambda: clients.statuses.get("A") == [429], "the displaced stream to be answered")
        finish_all(front)
        clients.join()


def test_without_keys_tenants_are_users() -> None:
    with front_end(stay_silent, limits=Limits(max_waiting=0)) as front:
        clients = Clients(front)
        for _ in range(7):
            clients.send("", user="alice")
        clients.send("", user="bob")
        assert post(front, "", user="alice").status_code == 429
        clients.send("", user="bob")
        assert front.engine.requests.sequences_by_tenant == {"alice": 6, "bob": 2}
        finish_all(front)
        clients.join()


def test_a_large_body_keeps_its_place_from_parsing_to_the_engine() -> None:
    """It is not admitted for parsing and then refused because others came meanwhile."""
    with front_end(stay_silent, limits=Limits(max_waiting=0)) as front:
        clients = Clients(front)
        for _ in range(7):
            clients.send("")
        clients.send("", padding=30_000)
        assert (preparing(front), front.engine.num_open) == (0, 8)
        assert post(front, "").status_code == 429
        finish_all(front)
        clients.join()
        assert clients.statuses == {"": [200] * 8}


def test_text_jobs_and_bodies_are_shared() -> None:
    shared = SharedLimit(10, {"heavy": 3.0})
    assert shared.has_room("a", 10)
    assert not shared.has_room("a", 11)
    shared.take("a", 10)
    assert not shared.has_room("a", 1)
    assert shared.has_room("b", 5)
    assert not shared.has_room("b", 6)
    assert shared.has_room("heavy", 7)
    shared.take("b", 5)
    assert not shared.has_room("b", 1)
    shared.take("heavy", 5)
    assert not shared.has_room("c", 1)  # twice the limit is in use
    shared.give_back("heavy", 5)
    assert shared.has_room("c", 1)
    shared.give_back("a", 10)
    shared.give_back("b", 5)
    assert shared.total == 0
    assert shared.has_room("b", 10)


def test_large_bodies_of_one_tenant_leave_room_for_others() -> None:
    with front_end(stay_silent, limits=Limits(max_held_bytes=3000), api_keys=KEYS) as front:
        clients = Clients(front)
        clients.send("A", stop="x" * 2800)
        assert post(front, "A", stop="x" * 600).status_code == 429
        clients.send("B", stop="x" * 600)
        finish_all(front)
        clients.join()
        assert clients.statuses == {"A": [200], "B": [200]}


def test_long_text_jobs_do_not_delay_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, threads = threading.Event(), list[str]()

    def answer(engine: ScriptedEngine, message: ToEngine) -> None:
        if isinstance(message, Submit):
            engine.publish(Update(message.request_id, text="ok", tokens=[5], finish_reason="length"))

    with front_end(answer, api_keys=KEYS) as front:

        def encode(text: str, *, max_tokens: int | None = None, **_: Any) -> list[int]:
            if max_tokens is None:  # a text job
                threads.append(threading.current_thread().name)
                assert go_on.wait(60)
            return [7]

        monkeypatch.setattr(front.service.model.tokenizer, "encode", encode)
        clients = Clients(front)
        for _ in range(8):
            clients.send_unsubmitted("A", path="/tokenize", prompt=LONG_TEXT)
        wait_for(lambda: front.service.admission._text_jobs.total == 8, "the text jobs to be admitted")
        try:
            assert [post(front, "B", prompt=LONG_TEXT).status_code for _ in range(3)] == [200] * 3
        finally:
            go_on.set()
        clients.join()
        assert clients.statuses == {"A": [200] * 8}
        assert {name.rsplit("_", 1)[0] for name in threads} == {"text-job"}
