"""Shards of a batch cover each line without a response once, and the files of an interrupted run are collected."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import InvalidParameter
from chairlift.server.batch.input import LineSet, plan_shards, read_lines, shard_files, shard_folder
from chairlift.server.batch.output import BatchCounts, BatchOutput
from chairlift.server.batch.run import BatchResponse, BatchRun

OK = b'{"usage":{"completion_tokens":2}}'


def write_input(path: Path, kinds: list[str]) -> Path:
    """Write a file with a request, a bad line or an empty line for each of `kinds`."""
    request = '{"custom_id": "%d", "url": "/v1/completions", "body": {}}'
    content = {"request": request, "bad": "{", "empty": ""}
    lines = [content[kind] % index if kind == "request" else content[kind] for index, kind in enumerate(kinds)]
    path.write_text("\n".join(lines))  # without a newline at the end
    return path


def answered(path: Path, ids: list[str]) -> BatchOutput:
    """Write an output with responses to these lines, and leave it locked."""
    output = BatchOutput(path)
    for line in read_lines(path.parent / "in.jsonl"):
        if line.custom_id in ids:
            output.write_response(line, 200, "r", OK)
        elif f"line {line.number}" in ids:
            output.write_problem(line)
    return output


def ids_of(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [line["custom_id"] or f"line {line['error']['line']}" for line in lines]


@given(
    kinds=st.lists(st.sampled_from(["request", "request", "bad", "empty"]), max_size=12),
    done=st.sets(st.integers(0, 11)),
    size=st.integers(1, 5),
)
def test_shards_cover_what_is_not_done(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], done: set[int], size: int
) -> None:
    source = write_input(tmp_path_factory.getbasetemp() / f"shards-{os.getpid()}.jsonl", kinds)
    lines = list(read_lines(source))
    skipped = LineSet()
    for line in lines:
        if line.number in done:
            skipped.add(line.custom_id, line.number)
    shards = [list(read_lines(source, ranges=shard.ranges)) for shard in plan_shards(source, skipped, size)]
    assert [line for shard in shards for line in shard] == [line for line in lines if line.number not in done]
    assert all(len(shard) == size for shard in shards[:-1])
    assert all(0 < len(shard) <= size for shard in shards)


def test_an_interrupted_run_with_shards_is_continued_without_them(tmp_path: Path) -> None:
    """Also after a crash between the copy of a shard and its removal, and with a torn line."""
    source, target = write_input(tmp_path / "in.jsonl", ["request"] * 6 + ["bad"]), tmp_path / "out.jsonl"
    answered(target, ["0", "1"]).close()
    shard_folder(target).mkdir()
    parts = [shard_folder(target) / "a-1.jsonl", shard_folder(target) / "a-2.jsonl"]
    for part, ids in zip(parts, (["1", "2"], ["4", "line 7"]), strict=True):
        part.parent.joinpath("in.jsonl").symlink_to(source) if not (part.parent / "in.jsonl").exists() else None
        answered(part, ids).close()
    (shard_folder(target) / "in.jsonl").unlink()
    with parts[1].open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"5')
    sent: list[str] = []

    async def send(path: str, body: bytes) -> BatchResponse:
        sent.append(path)
        return BatchResponse(200, "r", OK, output_tokens=2)

    run = BatchRun(source, target, concurrency=2)
    assert (run.done_before, run.total) == (5, 7)
    assert not shard_folder(target).exists()
    asyncio.run(run.run(send, lambda _: None))
    assert len(sent) == 2
    assert sorted(ids_of(target)) == ["0", "1", "2", "3", "4", "5", "line 7"]
    assert run.counts == BatchCounts(answered=2, output_tokens=4)


def test_responses_are_counted_as_they_are_taken_over(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", ["request"] * 3 + ["bad"])
    output, part = answered(tmp_path / "out.jsonl", ["0"]), answered(tmp_path / "part.jsonl", ["0", "1", "line 4"])
    output.done.add("0", 1)
    part.write_response(next(read_lines(tmp_path / "in.jsonl")), 500, "r", b"{}")
    assert output.take_over(part) == BatchCounts(answered=1, failed=1, output_tokens=2)
    assert not part.path.exists()
    assert ids_of(tmp_path / "out.jsonl") == ["0", "1", "line 4"]


def test_shards_of_another_input_are_refused(tmp_path: Path) -> None:
    source, target = write_input(tmp_path / "in.jsonl", ["request"]), tmp_path / "out.jsonl"
    shard_folder(target).mkdir()
    part = shard_folder(target) / "a-1.jsonl"
    part.write_text('{"id":"x","custom_id":"other","response":null,"error":null}\n')
    with pytest.raises(InvalidParameter, match=r"output: .*a-1.jsonl' has answers to requests that are not in"):
        BatchRun(source, target, concurrency=1)
    assert shard_files(target) == [part]
    assert target.read_bytes() == b""


def test_the_file_of_a_shard_may_be_locked_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = BatchOutput(tmp_path / "out.jsonl")
    monkeypatch.setattr("chairlift.server.batch.output.time.sleep", lambda seconds: first.close())
    BatchOutput(tmp_path / "out.jsonl", lock_timeout=10).close()


def test_an_error_keeps_its_parameter_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameter("input", "is bad", "code")))
    assert (error.parameter, error.problem, error.code, str(error)) == ("input", "is bad", "code", "input: is bad")
