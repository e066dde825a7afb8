"""Uploads and batches that would freeze the server, fill its disk or stop the batches of others."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.errors import InvalidParameter, StorageFull
from chairlift.server.batch import file_store
from chairlift.server.batch import input as batch_input
from chairlift.server.batch import runner as batch_runner
from chairlift.server.batch.file_store import OUTPUT_SECONDS, FileStore, Upload
from chairlift.server.batch.folder import BatchRecord, BatchStatus, FilesFolder
from chairlift.server.batch.input import BatchLine
from chairlift.server.batch.output import BatchOutput
from chairlift.server.http import bodies
from chairlift.server.wire.messages import Submit
from tests.server.front_end import NAME, FrontEnd, front_end, stay_silent
from tests.server.running_server import HTTP, wait_for

PATH = "/v1/completions"


def line(custom_id: str, prompt: str) -> bytes:
    """A line of a batch whose prompt is this JSON."""
    head = {"custom_id": custom_id, "method": "POST", "url": PATH}
    return json.dumps(head).encode()[:-1] + b', "body": {"model": "%b", "prompt": %b}}\n' % (
        NAME.encode(),
        prompt.encode(),
    )


def upload(front: FrontEnd, data: bytes) -> httpx.Response:
    return HTTP.post(f"{front.url}/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)})


def create(front: FrontEnd, data: bytes, **more: Any) -> httpx.Response:
    body = {"input_file_id": upload(front, data).json()["id"], "endpoint": PATH, "completion_window": "24h"}
    return HTTP.post(f"{front.url}/v1/batches", json=body | more)


def ended(front: FrontEnd, data: bytes) -> dict[str, Any]:
    """Run a batch to its end."""
    url = f"{front.url}/v1/batches/{create(front, data).json()['id']}"
    wait_for(lambda: HTTP.get(url).json()["status"] in ("completed", "failed"), "the batch to end")
    return dict(HTTP.get(url).json())


def lines_of(front: FrontEnd, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in HTTP.get(f"{front.url}/v1/files/{file_id}/content").text.splitlines()]


# ---- lines -------------------------------------------------------------------------------------------------------


def test_a_line_of_many_values_is_refused_before_they_are_built(tmp_path: Path) -> None:
    heavy = "[" + "[]," * (2 * 2**20) + "[]]"
    with front_end(files=FilesFolder(tmp_path, 10**9)) as front:
        data = b"".join(line(str(index), heavy) for index in range(3)) + line("good", '"hello"')
        batch = ended(front, data)
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        errors = [answer["error"]["code"] for answer in lines_of(front, batch["error_file_id"])]
        assert errors == ["too_many_values"] * 3  # Their values were counted in pieces, not built.


def test_lines_are_read_parsed_and_written_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[int]] = {}

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    note(batch_input, "_parse")
    note(bodies, "_parse_integer")
    note(BatchOutput, "_write_line")
    with front_end(files=FilesFolder(tmp_path, 10**9)) as front:
        batch = ended(front, line("a", json.dumps([1] * 20_000)) + line("b", '"hello"'))
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}  # one prompt is too long
        loops: list[int] = []
        front.engine.loop.call_soon_threadsafe(lambda: loops.append(threading.get_ident()))
        wait_for(lambda: loops, "the loop")
        assert set(threads) == {"_parse", "_parse_integer", "_write_line"}
        assert all(loops[0] not in found for found in threads.values())


def test_few_large_lines_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.batch.run.MAX_HELD_BYTES", 100_000)
    with front_end(stay_silent, files=FilesFolder(tmp_path, 10**9)) as front:
        data = b"".join(line(str(index), '"' + "x" * 100 + '"' + " " * 60_000) for index in range(6))
        create(front, data)
        wait_for(lambda: len(front.engine.received) == 2, "two lines to reach the engine")
        time.sleep(0.3)
        assert len([message for message in front.engine.received if isinstance(message, Submit)]) == 2


# ---- quota -------------------------------------------------------------------------------------------------------


def head_of_upload(length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    form = "content-type: multipart/form-data; boundary=x"
    return f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\n{form}\r\n{framing}\r\n\r\n".encode()


FORM = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


def test_uploads_at_the_same_time_share_the_quota(tmp_path: Path) -> None:
    quota = 2**20
    with front_end(files=FilesFolder(tmp_path, quota)) as front:
        connections = [front.connect() for _ in range(5)]
        answers = []
        for connection in connections:
            connection.sendall(head_of_upload(700_000) + FORM + b"a" * 100_000)
            if connection is not connections[0]:
                answers.append(connection.recv(1000))
            else:
                wait_for(lambda: list(tmp_path.glob("*/files/.upload-*")), "the first upload to begin")
        assert all(answer.startswith(b"HTTP/1.1 400") for answer in answers)
        assert upload(front, b"b" * 300_000).status_code == 200, "the rest of the quota is free"
        for connection in connections:
            connection.close()
        wait_for(lambda: upload(front, b"c" * 400_000).status_code == 200, "the room of those that left")
        assert sum(path.stat().st_size for path in tmp_path.glob("*/files/*.content")) == 700_000


def test_a_client_that_leaves_an_upload_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uploads = tmp_path / "public" / "files"
    with front_end(files=FilesFolder(tmp_path, 2**20)) as front:
        with front.connect() as connection:
            connection.sendall(head_of_upload(2**17) + FORM)
            wait_for(lambda: any(uploads.glob(".upload-*")), "the upload to begin")
        wait_for(lambda: not any(uploads.glob(".upload-*")), "the upload to end")
        assert upload(front, b"{}\n").status_code == 200
    assert not [one for one in caplog.records if one.levelname == "ERROR"], caplog.text


@pytest.mark.parametrize("length", [200 * 2**20, None])
def test_a_form_beyond_the_quota_is_refused_before_it_is_stored(tmp_path: Path, length: int | None) -> None:
    """Whether its length is declared or not."""
    sent = 0
    with front_end(files=FilesFolder(tmp_path, 2**20)) as front, front.connect() as connection:
        connection.sendall(head_of_upload(length))
        piece = FORM + b"a" * (2**16 - len(FORM))
        connection.setblocking(False)
        answer = b""
        end = time.monotonic() + 60
        while not answer and time.monotonic() < end:
            try:
                answer = connection.recv(1000)
            except BlockingIOError:
                if length is None and sent < 40 * 2**16:
                    connection.setblocking(True)
                    connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
                    connection.setblocking(False)
                    piece = b"a" * 2**16
                    sent += len(piece)
                time.sleep(0.01)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"quota_exceeded" in answer
        assert sent < 40 * 2**16


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("multipart/form-data; boundary=x; charset=undefined", 415),
        ("multipart/form-data; charset=PunyCode; boundary=x", 415),
        ("multipart/form-data; charset=UTF-8; boundary=x", 200),
        ("application/x-www-form-urlencoded", 400),
        ("multipart/form-data", 400),
        ('multipart/form-data; boundary="\xff"', 400),
    ],
)
def test_forms_are_read_as_utf_8_only(tmp_path: Path, content_type: str, status: int) -> None:
    """A charset chose among Python's codecs, one of which stopped the event loop and another gave 500."""
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' + FORM + b"a\r\n--x--\r\n"
    headers = {"content-type": content_type.encode("latin-1")}
    with front_end(files=FilesFolder(tmp_path, 2**20)) as front:
        answer = HTTP.post(f"{front.url}/v1/files", content=form, headers=headers)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("header", [b"a: b\r\n" * 2**18, b"a: " + b"b" * 2**20, b"b" * 2**20])
def test_headers_of_a_form_are_limited(tmp_path: Path, header: bytes) -> None:
    """The parser of forms has this limit since 0.0.31: all that arrived was copied for each piece of it."""
    with front_end(files=FilesFolder(tmp_path, 10**9)) as front:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = HTTP.post(f"{front.url}/v1/files", content=b"--x\r\n" + header, headers=headers)
        assert answer.status_code == 400, answer.text


def test_files_are_counted_and_empty_ones_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    monkeypatch.setattr(file_store, "MAX_UPLOADS", 2)
    with front_end(files=FilesFolder(tmp_path, 1000)) as front:
        assert upload(front, b"").json()["error"]["message"] == "file: must not be empty"
        assert [upload(front, b"a").status_code for _ in range(3)] == [200, 200, 400]
        first, *_ = HTTP.get(f"{front.url}/v1/files").json()["data"]
        HTTP.delete(f"{front.url}/v1/files/{first['id']}")
        store = FilesFolder(tmp_path, 1000).owner(None).files
        uploads = [Upload(store, 10), Upload(store, 10)]
        assert upload(front, b"a").status_code == 429
        uploads[0]._file.close()  # as if its process had been killed
        assert upload(front, b"a").status_code == 200
        uploads[1].close()


def test_a_list_does_not_read_all_records_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, 1000)
    files = [store.add([b"a"], str(index), "batch") for index in range(3)]
    assert len(store.all()) == 3
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert {file.id for file in store.all()} == {file.id for file in files}


def test_no_batch_begins_while_output_exceeds_the_quota(tmp_path: Path) -> None:
    """One input file could be answered again and again until the disk was full."""
    with front_end(files=FilesFolder(tmp_path, 10_000)) as front:
        data = line("a", '"hello"')
        assert ended(front, data)["status"] == "completed"
        output = FilesFolder(tmp_path, 10_000).owner(None).files.add([b"x" * 10_000], "old", "batch_output")
        source = HTTP.get(f"{front.url}/v1/files?purpose=batch").json()["data"][0]["id"]
        body = {"input_file_id": source, "endpoint": PATH, "completion_window": "24h"}
        url = f"{front.url}/v1/batches/{HTTP.post(f'{front.url}/v1/batches', json=body).json()['id']}"
        wait_for(lambda: HTTP.get(url).json()["status"] == "failed", "the batch to fail")
        assert "exceed the limit of 10000 bytes" in HTTP.get(url).json()["errors"]["data"][0]["message"]
        HTTP.delete(f"{front.url}/v1/files/{output.id}")
        assert ended(front, data)["status"] == "completed"


# ---- expiry ------------------------------------------------------------------------------------------------------


def record(batch_id: str, **more: Any) -> BatchRecord:
    defaults = {"endpoint": PATH, "input_file_id": "file-1", "completion_window": "24h", "created_at": 1}
    return BatchRecord(**{"id": batch_id, "expires_at": 2, **defaults, **more})


def test_finished_batches_and_their_output_expire(tmp_path: Path) -> None:
    folder = FilesFolder(tmp_path, 1000)
    owner, now = folder.owner(None), int(time.time())
    for batch in (
        record("batch_old", status=BatchStatus.COMPLETED, completed_at=now - OUTPUT_SECONDS - 1),
        record("batch_new", status=BatchStatus.COMPLETED, completed_at=now - OUTPUT_SECONDS + 1000),
        record("batch_open", status=BatchStatus.IN_PROGRESS),
    ):
        owner.batches.save(batch.id, batch)
    owner.files.add([b"x"], "old", "batch_output", file_id="file-old", expires_at=now - 1)
    owner.files.content("file-orphan").write_bytes(b"x")
    os.utime(owner.files.content("file-orphan"), (1, 1))
    folder.remove_expired()
    assert sorted(owner.batches.ids()) == ["batch_new", "batch_open"]
    assert not list((tmp_path / "public" / "files").glob("*.content"))


def test_a_client_may_have_its_output_deleted_sooner(tmp_path: Path) -> None:
    with front_end(files=FilesFolder(tmp_path, 10**6)) as front:
        wrong = create(front, line("a", '"hello"'), output_expires_after={"anchor": "created_at", "seconds": 5})
        assert wrong.json()["error"]["param"] == "output_expires_after.seconds"
        answer = create(front, line("a", '"hello"'), output_expires_after={"anchor": "created_at", "seconds": 3600})
        url = f"{front.url}/v1/batches/{answer.json()['id']}"
        wait_for(lambda: HTTP.get(url).json()["status"] == "completed", "the batch to end")
        file = HTTP.get(f"{front.url}/v1/files/{HTTP.get(url).json()['output_file_id']}").json()
        assert 3600 <= file["expires_at"] - file["created_at"] <= 3601


# ---- what others leave in the folder ------------------------------------------------------------------------------


def test_folders_and_records_of_others_stop_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = FilesFolder(tmp_path, 10**6)
    (tmp_path / "lost+found" / "batches").mkdir(parents=True)
    strange = record("batch_0", status=BatchStatus.VALIDATING)
    (tmp_path / "lost+found" / "batches" / "batch_0.json").write_text(json.dumps(strange.body()))
    (tmp_path / "public" / "batches" / "batch_1.json").mkdir(parents=True)  # cannot be read as a file
    (tmp_path / "abcd").mkdir()
    (tmp_path / "abcd" / "batches").write_text("no folder")
    with front_end(files=folder) as front:
        assert ended(front, line("a", '"hello"'))["status"] == "completed"
        assert len(HTTP.get(f"{front.url}/v1/batches").json()["data"]) == 1
        time.sleep(2 * batch_runner.POLL_SECONDS)
    said = [text for text in caplog.messages if "batch_1.json" in text]
    assert len(said) == 1
    assert "passed over" in said[0]
    assert not [text for text in caplog.messages if "cannot be read" in text]


# ---- a full disk -------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_to_clients(tmp_path: Path) -> None:
    with front_end(files=FilesFolder(tmp_path, 10**8)) as front:
        source = upload(front, line("a", '"hello"')).json()["id"]
        body = {"input_file_id": source, "endpoint": PATH, "completion_window": "24h"}
        with files_of_at_most(100):
            answers = [upload(front, b"x" * 3 * 2**20), upload(front, b"x" * 1000)]
            answers.append(HTTP.post(f"{front.url}/v1/batches", json=body))
        for answer in answers:
            assert answer.status_code == 507
            assert answer.json()["error"]["code"] == "insufficient_storage"
        assert len(list((tmp_path / "public" / "files").glob("*.content"))) == 1, "no parts are left"
        assert HTTP.get(f"{front.url}/v1/batches").json()["data"] == []


def test_a_response_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    output = BatchOutput(tmp_path / "out.jsonl")
    output.write_response(BatchLine(1, "a"), 200, "r", b"{}")
    with files_of_at_most(1000), pytest.raises(StorageFull):
        output.write_response(BatchLine(2, "b"), 200, "r", b'{"text":"%b"}' % (b"x" * 2000))
    output.write_response(BatchLine(3, "c"), 200, "r", b"{}")
    output.close()
    again = BatchOutput(tmp_path / "out.jsonl")
    assert [again.done.has(custom_id, 0) for custom_id in "abc"] == [True, False, True]
    again.close()


def test_a_batch_waits_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "PAUSE_SECONDS", 0.1)
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage(0))
        with front_end(files=FilesFolder(tmp_path, 10**6)) as front:
            batch = create(front, line("a", '"hello"')).json()["id"]
            url = f"{front.url}/v1/batches/{batch}"
            time.sleep(3 * batch_runner.POLL_SECONDS)
            assert HTTP.get(url).json()["status"] == "validating"
            assert not front.engine.received, "nothing is computed that cannot be written"
            full.undo()
            wait_for(lambda: HTTP.get(url).json()["status"] == "completed", "the batch to end")


def test_a_quota_is_exact(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", 1000)
    first = Upload(store, 0)
    assert first.finish(io.BytesIO(b"a" * 1000), "a", "batch", None).bytes == 1000
    with pytest.raises(InvalidParameter, match="limit of 1000 bytes"):
        Upload(store, 1)
    assert [path.name for path in store.folder.glob(".upload-*")] == []
