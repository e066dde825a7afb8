"""/v1/files and /v1/batches with the real OpenAI client: upload, run, results, cancellation, restart and limits."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.server.batch.file_store import FileStore
from chairlift.server.batch.folder import BatchRecord, BatchStatus, FilesFolder
from chairlift.server.batch.routes import add_file_routes
from chairlift.server.batch.runner import _finish
from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for

CHAT = "/v1/chat/completions"


def lines(count: int, max_tokens: int = 4, **more: Any) -> bytes:
    body = {"model": NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    requests = [
        {"custom_id": f"r{index}", "method": "POST", "url": CHAT, "body": body | {"messages": [_user(index)]}}
        for index in range(count)
    ]
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def _user(index: int) -> dict[str, str]:
    return {"role": "user", "content": f"what is {index}?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def files_server(tiny_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("files_server") / "log"
    running = start_server(tiny_folder, log, "--files-dir", str(folder), "--files-quota", "100kB")
    yield running
    assert running.stop() == 0, running.tail()


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch").id


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    def is_final() -> bool:
        return client.batches.retrieve(batch_id).status in ("completed", "failed", "expired", "cancelled")

    wait_for(is_final, "the batch to end")
    return client.batches.retrieve(batch_id)


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    answers = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {answer["custom_id"]: answer for answer in answers}
    assert len(found) == len(answers), "one line per custom_id"
    return found


def test_files_are_kept_until_they_are_deleted(files_server: RunningServer) -> None:
    client = files_server.client()
    data = lines(3)
    file = client.files.create(file=("../../odd\\name.jsonl", io.BytesIO(data)), purpose="batch")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "name.jsonl", len(data), "batch")
    assert client.files.retrieve(file.id).bytes == len(data)
    assert client.files.content(file.id).content == data
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_a_batch_is_answered_as_single_requests_are(files_server: RunningServer) -> None:
    client = files_server.client()
    source = upload(
        client, lines(6) + b'{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    )
    batch = client.batches.create(
        input_file_id=source, endpoint=CHAT, completion_window="24h", metadata={"night": "yes"}
    )
    assert batch.object == "batch"
    batch = finished(client, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"night": "yes"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1)
    assert batch.completed_at >= batch.in_progress_at >= batch.created_at
    answers = results(client, batch.output_file_id)
    assert set(answers) == {f"r{index}" for index in range(6)}
    alone = client.chat.completions.create(
        model=NAME, messages=[_user(3)], max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answers["r3"]["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert results(client, batch.error_file_id)["bad"]["error"]["code"] == "invalid_url"
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


def test_a_batch_is_cancelled_with_what_it_has(files_server: RunningServer) -> None:
    client = files_server.client()
    batch = client.batches.create(input_file_id=upload(client, lines(200, 100)), endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", "the batch to begin")
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = finished(client, batch.id)
    assert batch.status == "cancelled"
    counts = batch.request_counts
    assert counts.completed + counts.failed < counts.total == 200
    files_server.wait_idle()
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    # A fast machine answers enough before the cancellation to fill the quota, which other tests need.
    for file_id in filter(None, (batch.input_file_id, batch.output_file_id)):
        client.files.delete(file_id)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"\n", "has no lines"), (lines(1) * 2, "has the custom_id 'r0' of line 1 again")],
)
def test_a_batch_without_valid_lines_fails_as_a_whole(files_server: RunningServer, data: bytes, problem: str) -> None:
    client = files_server.client()
    batch = client.batches.create(input_file_id=upload(client, data), endpoint=CHAT, completion_window="24h")
    batch = finished(client, batch.id)
    assert batch.status == "failed"
    assert problem in batch.errors.data[0].message
    assert "/" not in batch.errors.data[0].message, "no paths of the server"


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"input_file_id": "file-none"}, "input_file_id"),
    ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
    ({"endpoint": "/v1/models"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {"a": 3}}, "metadata.a"),
    ({"metadatta": {}}, "metadatta"),
]


@pytest.mark.parametrize(("change", "param"), BAD_BATCHES)
def test_bad_batches_are_refused(files_server: RunningServer, change: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"} | change
    answer = files_server.post("/v1/batches", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def post_form(server: RunningServer, fields: dict[str, str], file: bytes | None) -> httpx.Response:
    files = None if file is None else {"file": ("a.jsonl", file)}
    return HTTP.post(server.url + "/v1/files", data=fields, files=files)


def test_bad_uploads_are_refused(files_server: RunningServer) -> None:
    cases = [
        (post_form(files_server, {"purpose": "fine-tune"}, b"x"), 400, "purpose"),
        (post_form(files_server, {"purpose": "batch", "file": "text"}, None), 400, "file"),
        (post_form(files_server, {"purpose": "batch", "surprise": "1"}, b"x"), 400, "surprise"),
        (post_form(files_server, {"purpose": "batch"}, b"x" * 100_001), 400, "file"),
        (
            post_form(
                files_server,
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
                b"x",
            ),
            400,
            "expires_after.seconds",
        ),
        (files_server.post("/v1/files", {"purpose": "batch"}), 400, "purpose"),
        (files_server.get("/v1/files/..%2f..%2fetc"), 404, None),
        (files_server.get("/v1/files?after=nothing"), 400, "after"),
        (files_server.get("/v1/batches/batch_none"), 404, "batch_id"),
    ]
    for answer, status, param in cases:
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_server_without_a_folder_says_how_to_give_one() -> None:
    without = FastAPI()
    add_file_routes(without, None, {})
    answer = TestClient(without).get("/v1/files")
    assert answer.status_code == 404
    assert "--files-dir" in answer.text


def test_a_killed_server_continues_its_batch(tiny_folder: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: after the restart there is one line for every request."""
    options = ("--files-dir", str(tmp_path / "files"), "--api-key", "night shift-key", "--api-key", "day other-key")
    first = start_server(tiny_folder, tmp_path / "log1", *options)
    client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="shift-key", max_retries=0, timeout=60)
    batch = client.batches.create(input_file_id=upload(client, lines(120, 40)), endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5, "some answers")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()

    second = start_server(tiny_folder, tmp_path / "log2", *options)
    client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="shift-key", max_retries=0, timeout=60)
    found = finished(client, batch.id)
    assert found.status == "completed"
    assert found.request_counts.completed == 120
    assert set(results(client, found.output_file_id)) == {f"r{index}" for index in range(120)}
    other = openai.OpenAI(base_url=f"{second.url}/v1", api_key="other-key", max_retries=0, timeout=60)
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(batch.id)
    assert list(other.files.list()) == []
    assert second.stop() == 0, second.tail()


def test_an_expired_batch_keeps_what_it_has(tmp_path: Path) -> None:
    owner = FilesFolder(tmp_path, 1000).owner(None)
    owner.batches.folder.mkdir(parents=True)
    answer = {"custom_id": "a", "response": {"status_code": 200}, "error": None}
    owner.results("batch_1").write_text(json.dumps(answer) + "\n")
    batch = BatchRecord(
        id="batch_1",
        endpoint=CHAT,
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=2,
        total=2,
        status=BatchStatus.IN_PROGRESS,
    )
    _finish(owner, batch)
    saved = owner.batches.find("batch_1")
    assert saved is not None
    assert (saved.status, saved.completed, saved.error_file_id) == (BatchStatus.EXPIRED, 1, None)
    assert saved.output_file_id is not None
    assert json.loads(owner.files.content(saved.output_file_id).read_text()) == answer


def test_a_cancellation_is_not_lost_to_a_save_of_progress(tmp_path: Path) -> None:
    owner = FilesFolder(tmp_path, 1000).owner(None)
    batch = BatchRecord(
        id="batch_1", endpoint=CHAT, input_file_id="f", completion_window="24h", created_at=1, expires_at=2
    )
    owner.batches.save(batch.id, batch)
    owner.cancel(batch.id)
    owner.batches.save(batch.id, batch)  # by the process that runs it
    (found,) = owner.all_batches()
    assert found.status is BatchStatus.CANCELLING
    batch.enter(BatchStatus.COMPLETED, 3.0)
    owner.batches.save(batch.id, batch)
    (found,) = owner.all_batches()
    assert found.status is BatchStatus.COMPLETED, "it was finished before the cancellation was seen"


def test_leftovers_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "public" / "files"
    folder.mkdir(parents=True)
    for name in (".file-1.content", ".file-2.content"):
        (folder / name).touch()
    os.utime(folder / ".file-1.content", (1, 1))
    assert FilesFolder(tmp_path, 1000).lock()
    assert [path.name for path in folder.iterdir()] == [".file-2.content"], "the newer one may still be written"


def test_one_process_runs_the_batches_of_a_folder(tmp_path: Path) -> None:
    first, second = FilesFolder(tmp_path, 1000), FilesFolder(tmp_path, 1000)
    assert first.lock()
    assert first.lock()
    assert not second.lock()


def test_a_folder_that_cannot_be_written_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["serve", "--files-dir", str(tmp_path / "file" / "x")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --files-dir: cannot write")


def test_files_expire(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1000)
    kept = store.add(io.BytesIO(b"a"), "a", "batch", expires_at=int(time.time()) + 1000)
    gone = store.add(io.BytesIO(b"b"), "b", "batch", expires_at=int(time.time()) - 1)
    assert [file.id for file in store.all()] == [kept.id]
    assert not store.content(gone.id).exists()
