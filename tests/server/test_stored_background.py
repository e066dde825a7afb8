"""Background responses: cancellation, streams that are read again, several processes, and processes that die."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from chairlift.server.access import KeySources, KeyTable
from chairlift.server.stored import background, database, store
from chairlift.server.stored.store import ResponseStore
from chairlift.server.wire.messages import Cancel, Submit, ToEngine, Update
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, answer_ok, front_end, stay_silent
from tests.server.response_events import OFFICIAL
from tests.server.running_server import HTTP, RunningServer, start_server, wait_for
from tests.server.test_stored import client_of, refusal

FINAL = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_SECONDS", "SAVE_SECONDS", "POLL_SECONDS", "TEND_SECONDS"):
        monkeypatch.setattr(background, name, 0.02)


@contextmanager
def serving(
    folder: Path, script: Callable[[ScriptedEngine, ToEngine], None] = answer_ok, **options: Any
) -> Iterator[FrontEnd]:
    with front_end(script, responses=ResponseStore(folder, 10**6, 1000.0), **options) as running:
        yield running


def begin(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": NAME, "input": "hello", "background": True, "max_output_tokens": 9, **more}
    return client.responses.create(**given)


def ended(client: openai.OpenAI, response_id: str) -> Response:
    wait_for(lambda: client.responses.retrieve(response_id).status in FINAL, "the response to end")
    return client.responses.retrieve(response_id)


def wait_submitted(front: FrontEnd, count: int = 1) -> None:
    wait_for(lambda: sum(isinstance(one, Submit) for one in front.engine.received) >= count, "the engine to get it")


class Typist:
    """Sends a letter per call of `type`, and ends with the last one."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.engine: ScriptedEngine | None = None

    def __call__(self, engine: ScriptedEngine, message: ToEngine) -> None:
        self.engine = engine
        if isinstance(message, Submit):
            self.requests.append(message.request_id)

    def type(self, letter: str, finish: str | None = None) -> None:
        assert self.engine is not None
        self.engine.publish(Update(self.requests[-1], text=letter, tokens=[5], cached_tokens=0, finish_reason=finish))


def test_a_background_response_is_generated_after_its_request(tmp_path: Path) -> None:
    typist = Typist()
    with serving(tmp_path, typist) as front:
        client = client_of(front)
        queued = begin(client, metadata={"a": "b"})
        assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
        wait_submitted(front)
        assert client.responses.retrieve(queued.id).status == "in_progress"
        assert refusal(400, front, "POST", "/v1/responses", input="x", previous_response_id=queued.id)["message"]
        typist.type("snow", "stop")
        response = ended(client, queued.id)
        assert (response.status, response.output_text) == ("completed", "snow")
        assert (response.created_at, response.metadata) == (queued.created_at, {"a": "b"})
        assert client.responses.input_items.list(queued.id).data[0].content[0].text == "hello"  # type: ignore[union-attr]
        assert client.responses.cancel(queued.id).status == "completed"
        assert refusal(400, front, "GET", f"/v1/responses/{queued.id}?stream=true")["param"] == "stream"
        then = threading.Timer(0.3, lambda: typist.type("ok", "stop"))
        then.start()
        assert client.responses.create(model=NAME, input="more", previous_response_id=queued.id).output_text == "ok"


def test_a_response_of_a_conversation_is_added_when_it_is_there(tmp_path: Path) -> None:
    with serving(tmp_path) as front:
        client = client_of(front)
        conversation = client.conversations.create()
        ended(client, begin(client, conversation=conversation.id).id)
        items = client.conversations.items.list(conversation.id, order="asc").data
        assert [item.role for item in items] == ["user", "assistant"]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_response_that_is_ended_by_its_client_is_not_computed_further(
    tmp_path: Path, how: str, *, stream: bool
) -> None:
    with serving(tmp_path, stay_silent) as front, serving(tmp_path) as other:
        client, elsewhere = client_of(front), client_of(other)
        if stream:
            opened = begin(client, stream=True)
            wait_submitted(front)
            with sqlite3.connect(tmp_path / database.NAME) as connection:
                (response_id,) = connection.execute("SELECT id FROM objects").fetchone()
        else:
            response_id = begin(client).id
            wait_submitted(front)
        getattr(elsewhere.responses, how)(response_id)  # another process of the same folder
        wait_for(lambda: any(isinstance(one, Cancel) for one in front.engine.received), "the engine to be told")
        if stream:
            assert [event.type for event in opened] == []
        if how == "cancel":
            assert client.responses.retrieve(response_id).status == "cancelled"
            assert client.responses.cancel(response_id).status == "cancelled"
        else:
            assert refusal(404, front, "GET", f"/v1/responses/{response_id}")


def test_only_background_responses_are_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path) as front:
        response = client_of(front).responses.create(model=NAME, input="hello", max_output_tokens=2)
        assert refusal(400, front, "POST", f"/v1/responses/{response.id}/cancel")["param"] == "response_id"


def test_a_stream_is_read_again_from_any_event(tmp_path: Path) -> None:
    typist = Typist()
    with serving(tmp_path, typist) as front, serving(tmp_path) as other:
        client = client_of(front)
        body = {"model": NAME, "input": "hello", "background": True, "stream": True, "max_output_tokens": 9}
        with httpx.stream("POST", f"{front.url}/v1/responses", json=body, timeout=60) as reply:
            wait_submitted(front)
            typist.type("s")
            lines = reply.iter_lines()
            first = [next(lines) for _ in range(2)]
        assert first[0] == "event: response.created"
        response_id = json.loads(first[1].removeprefix("data: "))["response"]["id"]
        # The client has left, and others read on: in this process and in another one.
        events: dict[str, list[Any]] = {"here": [], "there": []}

        def read(name: str, at: FrontEnd) -> None:
            stream = client_of(at).responses.retrieve(response_id, stream=True, starting_after=1)
            events[name] += stream

        readers = [
            threading.Thread(target=read, args=("here", front)),
            threading.Thread(target=read, args=("there", other)),
        ]
        for reader in readers:
            reader.start()
        for letter, finish in (("n", None), ("o", None), ("w", "stop")):
            typist.type(letter, finish)
        for reader in readers:
            reader.join(60)
        whole = list(client.responses.retrieve(response_id, stream=True))
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert whole[-1].type == "response.completed"
        assert whole[-1].response.to_dict() == client.responses.retrieve(response_id).to_dict()
        for event in whole:
            OFFICIAL.validate_python(event.to_dict(), strict=True)
        for found in events.values():
            assert [event.to_dict() for event in found] == [event.to_dict() for event in whole[2:]]
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=10**6)) == []
        assert refusal(400, front, "GET", f"/v1/responses/{response_id}?stream=true&starting_after=x")["param"]


def test_what_is_wrong_with_a_request_is_said_at_once_or_in_its_response(tmp_path: Path) -> None:
    with serving(tmp_path) as front:
        client = client_of(front)
        for wrong in ({"input": [{"type": "letter"}]}, {"temperature": -1}, {"store": False}, {"model": "other"}):
            with pytest.raises(openai.APIStatusError):
                begin(client, **wrong)
        too_long = ended(client, begin(client, input="word " * 400).id)
        assert too_long.error is not None
        assert (too_long.status, too_long.error.code) == ("failed", "invalid_prompt")
        assert "256" in too_long.error.message
        (event,) = begin(client, input="word " * 400, stream=True)
        assert (event.type, event.response.error.code) == ("response.failed", "invalid_prompt")


def test_a_response_waits_while_a_limit_of_its_key_is_reached(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: key-of-alice-1234567, concurrent_requests: 1}\n")
    typist = Typist()
    with serving(tmp_path / "stored", typist, keys=KeyTable(KeySources(file=keys).read())) as front:
        client = client_of(front, "key-of-alice-1234567")
        first = begin(client)  # The limit is that of requests, of which this is one until it is answered.
        wait_submitted(front)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model=NAME, input="hello")
        typist.type("a", "stop")
        assert ended(client, first.id).output_text == "a"


def test_one_owner_may_have_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_UNFINISHED", 2)
    with serving(tmp_path, stay_silent) as front:
        client = client_of(front)
        first, _ = begin(client), begin(client)
        with pytest.raises(openai.RateLimitError):
            begin(client)
        client.responses.cancel(first.id)
        wait_for(lambda: _runs(tmp_path) == 1, "the first one to end")
        begin(client)


def _runs(folder: Path) -> int:
    with sqlite3.connect(folder / database.NAME) as connection:
        return int(connection.execute("SELECT count(*) FROM objects WHERE runner IS NOT NULL").fetchone()[0])


def test_a_server_that_stops_says_so_in_its_responses(tmp_path: Path) -> None:
    with serving(tmp_path, stay_silent) as front:
        response = begin(client_of(front))
        wait_submitted(front)
    with serving(tmp_path) as front:
        found = client_of(front).responses.retrieve(response.id)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "server_error")
        assert "stopped" in found.error.message
        assert len(list(tmp_path.glob("runner-*"))) == 1, "only the lock of this process is left"


def test_a_response_whose_events_cannot_be_kept_fails(tmp_path: Path) -> None:
    typist = Typist()
    with front_end(typist, responses=ResponseStore(tmp_path, 5000, 1000.0)) as front:
        client = client_of(front)
        stream = begin(client, stream=True)
        wait_submitted(front)
        typist.type("x" * 6000)
        last = list(stream)[-1]
        assert last.type == "response.failed"
        assert ended(client, last.response.id).status == "failed"
        wait_for(lambda: not _runs(tmp_path), "the response to be let go")


def test_what_is_continued_does_not_make_room_for_it(tmp_path: Path) -> None:
    with front_end(responses=ResponseStore(tmp_path, 9000, 1000.0)) as front:
        client = client_of(front)
        first, second, _ = [client.responses.create(model=NAME, input="hello", max_output_tokens=2) for _ in range(3)]
        response = ended(client, begin(client, input="x" * 150, previous_response_id=first.id, metadata=_LABELS).id)
        assert response.status in ("completed", "incomplete"), response.error
        assert client.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


_LABELS = {f"label{index}": "x" * 500 for index in range(6)}


def test_a_client_that_leaves_early_leaves_no_response_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, queued = ResponseStore.queue, threading.Event()

    async def slow(self: ResponseStore, *given: Any) -> None:
        await queue(self, *given)
        queued.set()
        await asyncio.sleep(0.3)

    monkeypatch.setattr(ResponseStore, "queue", slow)
    with serving(tmp_path) as front:
        body = {"model": NAME, "input": "hello", "background": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{front.url}/v1/responses", json=body, timeout=0.2)
        assert queued.is_set()
        wait_submitted(front)
        wait_for(lambda: not _runs(tmp_path), "the response to end")


def test_a_stream_of_a_response_that_is_deleted_ends(tmp_path: Path) -> None:
    with serving(tmp_path, stay_silent) as front, serving(tmp_path) as other:
        begin(client_of(front), stream=True)
        wait_submitted(front)
        with sqlite3.connect(tmp_path / database.NAME) as connection:
            (response_id,) = connection.execute("SELECT id FROM objects").fetchone()
        with httpx.stream("GET", f"{other.url}/v1/responses/{response_id}?stream=true", timeout=60) as stream:
            client_of(other).responses.delete(response_id)
            assert stream.read() == b""  # and the chunks have their end


# ---- processes that are killed ---------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys, uuid
from pathlib import Path
from chairlift.server.responses.input import with_ids
from chairlift.server.stored.background import BackgroundResponses
from chairlift.server.stored.store import Continued, ResponseStore, Run
from chairlift.server.access import KeyTable

store = ResponseStore(Path(sys.argv[1]), 10**6, 1000.0)

async def main():
    background = BackgroundResponses(store, None, KeyTable())
    items = with_ids([("input", {"role": "user", "content": "x" * 300})])
    base = {"object": "response", "created_at": 1, "previous_response_id": None, "background": True, "output": []}
    run = background.new_run("public")
    await store.queue(run, {**base, "id": run.id, "status": "queued"}, items, Continued())
    await store.begin(run)
    await store.add_events(run, 0, b"event: response.created\\ndata: {}\\n\\n")
    print(run.id, flush=True)
    while True:
        response_id = f"resp_{uuid.uuid4().hex}"
        output = with_ids([("input", {"role": "assistant", "content": "y" * 3000})])
        response = {**base, "id": response_id, "status": "completed", "output": output}
        await store.keep("public", response, items, Continued(), store=True)
        print(response_id, flush=True)

asyncio.run(main())
"""


def test_what_was_answered_survives_kill_9(tmp_path: Path) -> None:
    written: list[str] = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        written += [process.stdout.readline().strip() for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        written += process.stdout.read().split()
        process.wait()
    assert all(written)
    unfinished = [written[0], written[next(i for i in range(40, len(written)) if i)]]
    with sqlite3.connect(tmp_path / database.NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (used,) = connection.execute("SELECT bytes FROM usage").fetchone()
        assert (used,) == connection.execute("SELECT sum(size) FROM objects").fetchone()
    with serving(tmp_path) as front:
        client = client_of(front)
        wait_for(lambda: _runs(tmp_path) == 0, "the responses of dead processes to be marked")
        wait_for(lambda: len(list(tmp_path.glob("runner-*"))) == 1, "the locks of dead processes to be removed")
        for response_id in written:
            response = client.responses.retrieve(response_id)
            assert response.status in ("completed", "failed")
        failed = client.responses.retrieve(unfinished[0])
        assert failed.error is not None
        assert "stopped" in failed.error.message
        (_, last) = client.responses.retrieve(unfinished[0], stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")


@pytest.mark.slow
def test_several_workers_share_a_folder_and_survive_kill_9(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--responses-dir", str(tmp_path / "stored"), "--api-workers", "2", "--kv-memory", "4MiB"]

    def many(server: RunningServer, answered: list[str]) -> None:
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
        while True:
            try:
                body["previous_response_id"] = answered[-1] if len(answered) % 5 else None
                answered.append(HTTP.post(f"{server.url}/v1/responses", json=body).json()["id"])
            except (httpx.HTTPError, KeyError, ValueError):
                return

    server = start_server(tiny_folder, tmp_path / "log", *options)
    answered: list[list[str]] = [[], [], []]
    threads = [threading.Thread(target=many, args=(server, one)) for one in answered]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(len(one) > 20 for one in answered), "some responses")
    long = {"model": "tiny", "input": "x", "background": True, "max_output_tokens": 200, "ignore_eos": True}
    waiting = [server.post("/v1/responses", long).json()["id"] for _ in range(20)]
    server.stop(signal.SIGKILL)
    for thread in threads:
        thread.join()
    server = start_server(tiny_folder, tmp_path / "log2", *options)
    try:
        for response_id in (id_ for one in answered for id_ in one):
            assert server.get(f"/v1/responses/{response_id}").status_code == 200
        statuses = [ended(server.client(), response_id).status for response_id in waiting]
        assert set(statuses) <= {"failed", "incomplete"}
        assert "failed" in statuses
    finally:
        assert server.stop() == 0, server.tail()
