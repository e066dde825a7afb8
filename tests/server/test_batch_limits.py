"""Limits of API keys and of the server apply to batches."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey, KeyLimits, KeyTable, _digest
from chairlift.server.batch.folder import BatchRecord, FilesFolder
from chairlift.server.batch.input import scan
from chairlift.server.batch.runner import WAIT_SECONDS
from chairlift.server.wire.messages import Submit, ToEngine, Update
from tests.server.front_end import NAME, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for

PATH = "/v1/completions"
LIMITED = APIKey("limited", _digest("sk-limited"), KeyLimits(tokens_per_minute=100))
FREE = APIKey("free", _digest("sk-free"))
REMOVED = APIKey("removed", _digest("sk-removed"))


def add_batch(folder: FilesFolder, key: APIKey, *bodies: dict[str, Any]) -> None:
    """Add a batch; each owner's has the same id, and all of them run."""
    owner = folder.owner(key.digest)
    lines = [
        {"custom_id": f"r{index}", "method": "POST", "url": PATH, "body": {"model": NAME, "prompt": "hello"} | body}
        for index, body in enumerate(bodies)
    ]
    source = owner.files.content("file-1")
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = int(time.time())
    batch = BatchRecord(
        id="batch_1",
        endpoint=PATH,
        input_file_id="file-1",
        completion_window="24h",
        created_at=now,
        expires_at=now + 600,
        key=key.digest,
        tenant=key.name,
    )
    owner.batches.save(batch.id, batch)


def find(folder: FilesFolder, key: APIKey) -> BatchRecord:
    batch = folder.owner(key.digest).batches.find("batch_1")
    assert batch is not None
    return batch


def ended(folder: FilesFolder, key: APIKey) -> BatchRecord:
    wait_for(lambda: find(folder, key).status.is_final, "the batch to end")
    return find(folder, key)


def test_the_limits_of_a_key_apply_to_its_batches(tmp_path: Path) -> None:
    folder = FilesFolder(tmp_path, 10**6)
    add_batch(folder, LIMITED, {"max_tokens": 4}, {"max_tokens": 99})
    add_batch(folder, REMOVED, {"max_tokens": 4})
    with front_end(keys=KeyTable([LIMITED]), files=folder) as front:
        limited, removed = ended(folder, LIMITED), ended(folder, REMOVED)
        assert front.metric("requests_rate_limited_total", key="limited", limit="tokens") == 1
    assert (limited.status, limited.completed, limited.failed) == ("completed", 1, 1)
    assert (removed.status, removed.completed) == ("failed", 0)
    assert "no longer valid" in str(removed.problem)


def test_lines_of_batches_leave_slots_to_other_requests(tmp_path: Path) -> None:
    """Of 8 slots a batch takes 6, so its line waits while others have 6 requests."""
    folder = FilesFolder(tmp_path, 10**6)
    headers = {"authorization": "Bearer sk-free"}
    with front_end(stay_silent, keys=KeyTable([FREE]), files=folder) as front, ThreadPoolExecutor(6) as clients:
        body = {"model": NAME, "prompt": "hello"}
        answers = [clients.submit(HTTP.post, front.url + PATH, json=body, headers=headers) for _ in range(6)]
        wait_for(lambda: len(front.engine.received) == 6, "the requests to reach the engine")
        add_batch(folder, FREE, {})
        wait_for(lambda: find(folder, FREE).status == "in_progress", "the batch to begin")
        time.sleep(10 * WAIT_SECONDS)
        first, *others = list(front.engine.received)
        assert len(others) == 5
        front.engine.publish(Update(request_id(first), finish_reason="length"))
        wait_for(lambda: len(front.engine.received) == 7, "the line to reach the engine")
        for message in (*others, front.engine.received[6]):
            front.engine.publish(Update(request_id(message), finish_reason="length"))
        assert [answer.result().status_code for answer in answers] == [200] * 6
        assert ended(folder, FREE).completed == 1


def test_a_damaged_record_stops_no_other_batch(tmp_path: Path) -> None:
    folder = FilesFolder(tmp_path, 10**6)
    add_batch(folder, FREE, {"max_tokens": 4})
    for name in ("batch_0", "batch_2"):
        (folder.owner(FREE.digest).batches.folder / f"{name}.json").write_text('{"id": 3}')
    with front_end(keys=KeyTable([FREE]), files=folder) as front:
        assert ended(folder, FREE).completed == 1
        headers = {"authorization": "Bearer sk-free"}
        listed = HTTP.get(f"{front.url}/v1/batches", headers=headers).json()["data"]
        assert [batch["id"] for batch in listed] == ["batch_1"]
        assert HTTP.get(f"{front.url}/v1/batches/batch_2", headers=headers).status_code == 404


def request_id(message: ToEngine) -> str:
    assert isinstance(message, Submit)
    return message.request_id


def test_a_batch_with_too_many_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("1\n" * 4)
    assert len(scan(tmp_path / "lines", max_lines=4)) == 4
    with pytest.raises(InvalidParameter, match="more than 3 lines"):
        scan(tmp_path / "lines", max_lines=3)
