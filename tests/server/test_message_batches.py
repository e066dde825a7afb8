"""/v1/messages/batches with the real Anthropic client: results, cancellation, tenants, quota and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse

from chairlift.server.batch import runner
from chairlift.server.batch.folder import FilesFolder
from tests.server.front_end import NAME, FrontEnd, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for

PATH = "/v1/messages/batches"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontEnd]:
    with front_end(files=FilesFolder(tmp_path, 10**6)) as running:
        yield running


def client_of(front: FrontEnd, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=front.url, api_key=key, max_retries=0, timeout=60)


def line(custom_id: str, text: str = "hello", **more: Any) -> Any:
    params = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "params": params}


def ended(client: anthropic.Anthropic, batch_id: str) -> MessageBatch:
    wait_for(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended", "the batch to end")
    return client.messages.batches.retrieve(batch_id)


def results(client: anthropic.Anthropic, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in client.messages.batches.results(batch_id):
        MessageBatchIndividualResponse.model_validate(one.to_dict())
        assert one.custom_id not in found
        found[one.custom_id] = one.result
    return found


def test_a_batch_is_answered_as_single_messages_are(front: FrontEnd) -> None:
    client = client_of(front)
    wrong = [line("stream", stream=True), line("cold", temperature=-1), line("other", model="other")]
    batch = client.messages.batches.create(requests=[*(line(f"r{index}") for index in range(4)), *wrong])
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == ("message_batch", "in_progress", 7)
    assert batch.results_url is None
    batch = ended(client, batch.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled) == (4, 3, 0, 0)
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at
    found = results(client, batch.id)
    assert found.keys() == {"r0", "r1", "r2", "r3", "stream", "cold", "other"}
    assert found["r1"].message.content[0].text == "ok"
    assert found["r1"].message.stop_reason == "max_tokens"
    assert found["other"].error.error.type == "not_found_error"
    assert "temperature" in found["cold"].error.error.message
    assert "stream" in found["stream"].error.error.message
    client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)
    assert HTTP.get(f"{front.url}/v1/files").json()["data"] == [], "its files are gone, too"


def test_batches_are_listed_in_pages(front: FrontEnd) -> None:
    client = client_of(front)
    ids = {client.messages.batches.create(requests=[line("a")]).id for _ in range(5)}
    pages = [batch.id for batch in client.messages.batches.list(limit=2)]
    assert (len(pages), set(pages)) == (5, ids)
    back = client.messages.batches.list(limit=2, before_id=pages[4])
    assert [batch.id for batch in back.data] == pages[2:4]
    assert back.has_more
    assert HTTP.get(f"{front.url}/v1/batches").json()["data"] == [], "they are no batches of OpenAI's"
    for batch_id in ids:
        ended(client, batch_id)


def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    with front_end(stay_silent, files=FilesFolder(tmp_path, 10**6)) as front:
        client = client_of(front)
        batch = client.messages.batches.create(requests=[line("a"), line("b", stream=True)])
        wait_for(lambda: bool(front.engine.received), "the batch to begin")
        with pytest.raises(anthropic.BadRequestError, match="not ended"):
            client.messages.batches.delete(batch.id)
        assert HTTP.get(f"{front.url}{PATH}/{batch.id}/results").status_code == 400
        cancelled = client.messages.batches.cancel(batch.id)
        assert cancelled.processing_status == "canceling"
        assert cancelled.cancel_initiated_at is not None
        assert ended(client, batch.id).request_counts.canceled == 1
        assert results(client, batch.id)["a"].type == "canceled"
        assert client.messages.batches.cancel(batch.id).processing_status == "ended"


def test_results_whose_files_were_deleted(front: FrontEnd) -> None:
    client = client_of(front)
    batch = ended(client, client.messages.batches.create(requests=[line("a")]).id)
    (output,) = (file for file in HTTP.get(f"{front.url}/v1/files").json()["data"] if file["purpose"] == "batch_output")
    assert HTTP.delete(f"{front.url}/v1/files/{output['id']}").status_code == 200
    reply = HTTP.get(f"{front.url}{PATH}/{batch.id}/results")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_a_tenant_sees_no_batch_of_another(tmp_path: Path) -> None:
    keys = ["alice key-of-alice-123", "bob key-of-bob-123456"]
    with front_end(files=FilesFolder(tmp_path, 10**6), api_keys=keys) as front:
        alice, bob = (client_of(front, key.split()[1]) for key in keys)
        batch = ended(alice, alice.messages.batches.create(requests=[line("a")]).id)
        assert bob.messages.batches.list().data == []
        for attempt in (bob.messages.batches.retrieve, bob.messages.batches.cancel, bob.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                attempt(batch.id)
        reply = HTTP.get(f"{front.url}{PATH}/{batch.id}/results", headers={"x-api-key": "key-of-bob-123456"})
        assert reply.status_code == 404
        assert results(alice, batch.id)["a"].type == "succeeded"


@pytest.mark.parametrize(
    ("requests", "problem"),
    [
        ([], "at least 1"),
        ([line("a b")], "custom_id"),
        ([line("a"), line("a")], "requests[1].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([line("a") | {"parms": {}}], "requests[0].parms"),
        ("all", "requests"),
        ([line("a", "x" * 2000)], "limit of 1500"),
    ],
)
def test_what_is_wrong_with_a_batch_is_said_at_once(tmp_path: Path, requests: Any, problem: str) -> None:
    with front_end(files=FilesFolder(tmp_path, 1500)) as front:
        reply = HTTP.post(front.url + PATH, json={"requests": requests})
        assert reply.status_code == 400
        error = reply.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert problem in error["error"]["message"]
        assert HTTP.get(front.url + PATH).json()["data"] == []


def test_a_server_without_a_folder_says_how_to_get_one() -> None:
    with front_end() as front:
        error = HTTP.post(front.url + PATH, json={"requests": [line("a")]})
        assert error.status_code == 404
        assert "--files-dir" in error.json()["error"]["message"]
