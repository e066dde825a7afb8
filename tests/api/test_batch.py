"""`chairlift batch`: every line gets exactly one response, despite failures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from chairlift.cli.main import app
from chairlift.client.http import HttpResponse
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.server.batch import input as batch_input
from chairlift.server.batch.input import BatchLine, LineSet, read_lines, scan
from chairlift.server.batch.output import BatchOutput
from chairlift.server.batch.run import BatchResponse, BatchRun, remote_server
from chairlift_lab.load.local_server import MODEL_NAME, local_server


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    if url == "/v1/completions":
        body = {"prompt": "a chairlift", "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


# ---- input -------------------------------------------------------------------------------------------------------

BAD_LINES = [
    ("{", "invalid_json", None),
    ("[1]", "invalid_line", None),
    ({"url": "/v1/completions", "body": {}}, "invalid_custom_id", None),
    (request("") | {"custom_id": 7}, "invalid_custom_id", None),
    (request("a") | {"metod": "POST"}, "invalid_line", "a"),
    (request("b") | {"method": "GET"}, "invalid_method", "b"),
    (request("c", "/v1/audio/speech"), "invalid_url", "c"),
    (request("d") | {"url": None}, "invalid_url", "d"),
    (request("e") | {"body": "text"}, "invalid_body", "e"),
    (request("f", stream=True), "invalid_body", "f"),
    ("[" * 1500, "invalid_line", None),
    ('{"body":' + "[" * 1500 + "}", "invalid_json", None),
    (request("g", padding=[0] * 3000), "too_many_values", None),
    ('"' + "x" * 3000 + '"', "line_too_long", None),
]


def test_an_invalid_line_gets_an_error_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 200_000)
    monkeypatch.setattr(batch_input, "MAX_LINE_VALUES", 2000)
    content = [line for line, _, _ in BAD_LINES[:-1]]
    source = write(tmp_path / "in.jsonl", ["", *content, "x" * 300_000, request("good")])
    lines = list(read_lines(source))
    expected = [(code, custom_id) for _, code, custom_id in BAD_LINES]
    assert [(line.code, line.custom_id) for line in lines[:-1]] == expected
    assert [line.number for line in lines] == list(range(2, len(lines) + 2))
    assert all(f"line {line.number}: " in line.problem for line in lines[:-1])
    assert (lines[-1].custom_id, lines[-1].path, lines[-1].problem) == ("good", "/v1/completions", "")
    assert json.loads(lines[-1].body)["prompt"] == "a chairlift"


def test_a_duplicate_custom_id_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a"), "", request("b"), request("a")])
    result = CliRunner().invoke(app, ["batch", str(source), str(tmp_path / "out.jsonl"), "--model", "nowhere"])
    assert result.exit_code == 2
    assert "line 4" in result.stderr
    assert "custom_id 'a' of line 1 again" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    with pytest.raises(InvalidParameter, match=r"input: .*no lines"):
        scan(source)
    with pytest.raises(InvalidParameter, match="input: cannot read"):
        scan(tmp_path / "nowhere.jsonl")


# ---- output ------------------------------------------------------------------------------------------------------


@given(ids=st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True), cut=st.integers(0, 10_000))
def test_an_output_that_was_cut_anywhere_keeps_its_whole_lines(ids: list[str], cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        output = BatchOutput(path)
        for number, custom_id in enumerate(ids):
            output.write_response(BatchLine(number, custom_id), 200, "req-1", b'{"text":"\\u00e4\\n"}')
        output.write_problem(BatchLine(99, None, problem="line 99: is not valid JSON", code="invalid_json"))
        output.close()
        whole = path.read_bytes()
        path.write_bytes(whole[: cut % (len(whole) + 1)])
        kept = path.read_bytes().count(b"\n")
        again = BatchOutput(path)
        assert path.read_bytes() == b"".join(line + b"\n" for line in whole.split(b"\n")[:kept])
        assert len(again.done) == kept
        assert [again.done.has(one, 0) for one in ids] == [index < kept for index in range(len(ids))]
        assert again.done.has(None, 99) == (kept > len(ids))
        again.write_response(BatchLine(1, "another"), 200, "req-2", b"{}")
        again.close()
        assert path.read_bytes().count(b"\n") == kept + 1


def test_another_kind_of_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for content in (
        "important\nnotes\n",
        '{"a": 1}\n{"b": 2}\n',
        '{"custom_id": null, "response": {}, "error": null}\nx\n',
    ):
        path.write_text(content)
        with pytest.raises(InvalidParameter, match=r"output: line 1 of .* is no answer to a batch"):
            BatchOutput(path)
        assert path.read_text() == content


def test_an_output_with_answers_to_other_requests_is_refused(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    output = BatchOutput(target)
    output.write_response(BatchLine(1, "z"), 200, "r", b"{}")
    output.close()
    with pytest.raises(InvalidParameter, match=r"output: .*not in"):
        BatchRun(source, target, concurrency=1)
    with pytest.raises(InvalidParameter, match="output: is the input"):
        BatchRun(source, source, concurrency=1)
    with pytest.raises(InvalidParameter, match="output: cannot write"):
        BatchRun(source, tmp_path / "no" / "out.jsonl", concurrency=1)


def test_two_runs_never_share_an_output(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out.jsonl")
    with pytest.raises(InvalidParameter, match=r"output: .*another process"):
        BatchOutput(tmp_path / "out.jsonl")
    first.close()
    BatchOutput(tmp_path / "out.jsonl").close()


def test_a_line_set_distinguishes_numbers_from_ids() -> None:
    lines = LineSet()
    lines.add("3", 1)
    lines.add(None, 4)
    assert lines.has("3", 9)
    assert lines.has(None, 4)
    assert not lines.has(None, 3)
    assert not lines.has("4", 4)
    assert len(lines) == 2


# ---- runs with a fake engine -------------------------------------------------------------------------------------


def run_batch(source: Path, target: Path, send: Any, concurrency: int = 4) -> BatchRun:
    run = BatchRun(source, target, concurrency=concurrency)
    asyncio.run(run.run(send, lambda run: None))
    return run


def test_a_large_file_is_never_held_in_memory(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(str(index), padding="x" * 1000) for index in range(3000)])
    under_way = most = 0

    async def send(path: str, body: bytes) -> BatchResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 7:
            await asyncio.sleep(0.001)
        under_way -= 1
        return BatchResponse(200, "r", b"{}", output_tokens=2)

    import tracemalloc

    tracemalloc.start()
    run = run_batch(source, tmp_path / "out.jsonl", send, concurrency=7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most == 7
    assert (run.counts.answered, run.counts.output_tokens) == (3000, 6000)
    assert peak < source.stat().st_size / 2


def test_busy_servers_and_dead_engines_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.batch.run.RETRY_SECONDS", 0.001)
    source = write(tmp_path / "in.jsonl", [request(str(index), user=str(index)) for index in range(20)])
    tries: dict[str, int] = {}

    async def send(path: str, body: bytes) -> BatchResponse:
        """Line 13 kills the engine, and with it all requests in flight."""
        user = json.loads(body)["user"]
        tries[user] = tries.get(user, 0) + 1
        await asyncio.sleep(0.001)
        if user == "13" or (tries[user] == 1 and user in ("12", "14")):
            return BatchResponse(503, "r", b'{"error":{"message":"gone"}}')
        return BatchResponse(429 if tries[user] <= 5 and user == "3" else 200, "r", b"{}")

    run = run_batch(source, tmp_path / "out.jsonl", send)
    assert (run.counts.answered, run.counts.failed) == (19, 1)
    assert (tries["3"], tries["12"], tries["13"], tries["7"]) == (6, 2, 3, 1)
    failed = [line for line in answers(tmp_path / "out.jsonl") if line["response"]["status_code"] != 200]
    assert [(line["custom_id"], line["error"]) for line in failed] == [("13", None)]


def test_a_permanent_engine_failure_ends_the_run_without_losing_answers(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request(str(index)) for index in range(9)]), tmp_path / "out.jsonl"
    left = 4

    async def send(path: str, body: bytes) -> BatchResponse:
        nonlocal left
        left -= 1
        if left < 0:
            raise EngineDead("it died 6 times in a row")
        return BatchResponse(200, "r", b"{}")

    with pytest.raises(EngineDead, match="6 times"):
        run_batch(source, target, send)
    assert len(answers(target)) == 4
    left = 100
    assert run_batch(source, target, send).done_before == 4
    assert sorted(line["custom_id"] for line in answers(target)) == [str(index) for index in range(9)]


# ---- the command -------------------------------------------------------------------------------------------------


def start(tiny: str, source: Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    engine = ["--model", tiny, "--served-model-name", "tiny", "--device", "cpu", "--kv-memory", "2MiB"]
    command = [sys.executable, "-m", "chairlift", "batch", str(source), str(target), *engine, *options]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)


def test_answers_equal_those_of_the_server(tiny: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    lines = [
        request("text", seed=1),
        request("chat", "/v1/chat/completions", messages=messages, max_tokens=3, ignore_eos=True, n=2),
        request("response", "/v1/responses", input="hello", max_output_tokens=3),
        "not JSON",
        request("embedding", "/v1/embeddings", input="x"),
        request("image", "/v1/images/generations", prompt="x"),
        request("wrong model", model="gpt-4o"),
        request("wrong value", temperature=-1),
        request("wrong name", temperatur=1),
        request("too long", prompt="word " * 300),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(tiny, source, target)
    _, notes = process.communicate(timeout=180)
    assert process.returncode == 0, notes
    assert b"4 answered, 6 failed, " in notes
    found = {line["custom_id"]: line for line in answers(target)}
    assert len(found) == len(lines)
    assert all(list(line) == ["id", "custom_id", "response", "error"] for line in found.values())
    assert len({line["id"] for line in found.values()}) == len(lines)

    def body(custom_id: str) -> dict[str, Any]:
        response = found[custom_id]["response"]
        assert response["request_id"]
        assert found[custom_id]["error"] is None
        return {**response["body"], "status": response["status_code"]}

    assert body("text")["usage"]["completion_tokens"] == 4
    assert len(body("chat")["choices"]) == 2
    assert body("response")["object"] == "response"
    statuses = {name: body(name)["status"] for name in ("text", "chat", "response", "wrong model", "wrong value")}
    assert statuses == {"text": 200, "chat": 200, "response": 200, "wrong model": 404, "wrong value": 400}
    assert body("wrong name")["error"]["param"] == "temperatur"
    assert body("too long")["status"] == 400
    assert found[None]["error"] == {"code": "invalid_json", "message": "line 4: is not valid JSON", "line": 4}  # type: ignore[index]
    assert found["image"]["error"]["code"] == "invalid_url"
    assert len(body("embedding")["data"][0]["embedding"]) == 64
    # Repeating a finished command reports that and loads nothing.
    before = target.read_bytes()
    again = start(tiny, source, target, "--quiet")
    _, notes = again.communicate(timeout=60)
    assert again.returncode == 0
    assert b"10 of 10 requests were answered before" in notes
    assert target.read_bytes() == before


def test_a_killed_run_can_be_continued(tiny: str, tmp_path: Path) -> None:
    """After two SIGKILLs and a torn last line, each request is answered exactly once."""
    lines: list[Any] = [request(f"request {index}", max_tokens=12, prompt=[10 + index % 300]) for index in range(150)]
    lines[40] = "bad"
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    for least in (20, 70):
        process = start(tiny, source, target, "--concurrency", "8")
        end = time.monotonic() + 120
        while not target.exists() or target.read_bytes().count(b"\n") < least + random.randrange(10):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.002)
        process.kill()
        process.communicate()
        with target.open("ab") as file:
            file.write(b'{"id":"batch_req_torn","custom_id":"request 1')
    done = target.read_bytes().count(b"\n")
    assert done < 150, "the run was complete before it was killed"
    process = start(tiny, source, target, "--concurrency", "8")
    _, notes = process.communicate(timeout=180)
    assert process.returncode == 0, notes
    assert f"{done} of 150 requests were answered before".encode() in notes
    found = answers(target)
    ids = [line["custom_id"] for line in found]
    assert sorted(map(str, ids)) == sorted([f"request {index}" for index in range(150) if index != 40] + ["None"])
    for line in found:
        if line["custom_id"] is not None:
            assert line["response"]["body"]["usage"]["completion_tokens"] == 12


def test_sigterm_stops_the_engine_too(tiny: str, tmp_path: Path) -> None:
    lines = [request(str(index), max_tokens=20) for index in range(5000)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start(tiny, source, target)
    while not target.exists() or not target.read_bytes():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    children = " ".join((thread / "children").read_text() for thread in threads).split()
    assert children
    process.send_signal(signal.SIGTERM)
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, notes
    assert b"Traceback" not in notes
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert 0 < len(answers(target)) < 5000


def test_a_batch_can_be_sent_to_a_server(tiny: str, tmp_path: Path) -> None:
    lines = [request(str(index), model=MODEL_NAME) for index in range(5)] + [request("bad", model="other")]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with local_server(tiny, {"device": "cpu", "kv_memory": "2MiB"}, max_waiting=10) as server:
        result = CliRunner().invoke(app, ["batch", str(source), str(target), "--url", server.url])
    assert result.exit_code == 0, result.output
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in answers(target)}
    assert statuses == {str(index): 200 for index in range(5)} | {"bad": 404}
    refused = CliRunner().invoke(app, ["batch", str(source), str(target), "--url", "localhost:1", "--model", "a"])
    assert refused.exit_code == 2
    assert "--model: is for an own engine" in refused.stderr


@pytest.mark.parametrize(
    "body",
    [
        b'{\n  "id": "a",\r\n  "usage": null\n}\n',
        b'{"id":"a","usage":[7]}',
        b"<h1>Bad\nGateway</h1>",
        b"[1]",
        b"\xff",
        b"",
    ],
)
def test_any_response_of_a_remote_server_becomes_one_line(tmp_path: Path, body: bytes) -> None:
    class FakeClient:
        address = "localhost:1"

        async def post(self, path: str, body_: bytes, on_body: Callable[[bytes], None]) -> HttpResponse:
            on_body(body)
            return HttpResponse(200, {})

        def close(self) -> None:
            pass

    async def check() -> None:
        async with remote_server(FakeClient()) as send:  # type: ignore[arg-type]
            await BatchRun(source, target, concurrency=1).run(send, lambda _: None)

    source, target = write(tmp_path / "in.jsonl", [request("a"), request("b")]), tmp_path / "out.jsonl"
    asyncio.run(check())
    found = [line["response"]["body"] for line in answers(target)]
    assert found == [json.loads(body)] * 2 if body[:1] == b"{" else all("error" in one for one in found)
    again = BatchRun(source, target, concurrency=1)
    again.output.close()
    assert again.is_complete


def test_a_model_that_cannot_be_loaded_ends_the_batch_at_once(tiny: str, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    process = start(tiny, source, target, "--block-size", "100000")
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 2
    assert b"error: the engine failed: " in notes
    assert b"Traceback" not in notes
    assert target.read_bytes() == b""
