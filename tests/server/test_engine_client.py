"""The front end's side of the engine process, without an engine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.server.process.engine_client import (
    EngineClient,
    EngineState,
    Supervision,
    make_socket_folder,
    remove_stale_folders,
)
from chairlift.server.process.streams import FORGET_SECONDS, MAX_DEATHS, MAX_SUSPECTS, Quarantine, UpdateStream
from chairlift.server.wire.messages import (
    Cancel,
    FromEngine,
    Refused,
    StepReport,
    Submit,
    Update,
    decode_to_engine,
    encode,
)


class FakeEngine:
    """Records the messages it gets, and sends those of the test."""

    def __init__(self, client: EngineClient) -> None:
        self.received: list[bytes] = []
        self._reports: asyncio.Queue[bytes] = asyncio.Queue()
        self.commands = SimpleNamespace(send=self.received.append)
        self.reports = SimpleNamespace(recv=self._reports.get)
        handle: Any = self
        client.state, client._handle = EngineState.READY, handle
        self._listener = asyncio.create_task(client._receive(handle))

    def report(self, message: FromEngine) -> None:
        self._reports.put_nowait(encode(message))


def idle_client(**options: Any) -> EngineClient:
    return EngineClient("model", {}, lambda report: None, options.pop("on_restart", lambda: None), **options)


def prompt(name: str, *tokens: int) -> Submit:
    return Submit(name, list(tokens), SamplingParams(n=2), None, "")


def test_a_stream_merges_unread_updates_and_then_fails() -> None:
    async def check() -> None:
        stream = UpdateStream(["a", "b"])
        stream.push(Update("a", text="x", tokens=[1], cached_tokens=3))
        stream.push(Update("b", text="-", tokens=[9]))
        stream.push(Update("a", text="y", tokens=[2], finish_reason="stop"))
        assert stream.end("error", EngineDead("gone")) == ["b"]
        reader = aiter(stream)
        merged = Update("a", text="xy", tokens=[1, 2], cached_tokens=3, finish_reason="stop")
        assert await anext(reader) == [merged, Update("b", text="-", tokens=[9])]
        with pytest.raises(EngineDead):
            await anext(reader)

    asyncio.run(check())


def test_a_refused_prompt_cancels_the_others_of_its_request() -> None:
    async def check() -> None:
        client = idle_client()
        engine = FakeEngine(client)
        stream = client.submit([prompt("good", 1), prompt("bad", 2)])
        engine.report(Refused("bad", "prompt", "is bad"))
        with pytest.raises(InvalidParameter):
            async for _ in stream:
                pass
        last = decode_to_engine(engine.received[-1])
        assert isinstance(last, Cancel)
        assert {"good", "good#1"} <= set(last.request_ids)
        assert client.num_open == 0

    asyncio.run(check())


def test_a_message_that_cannot_be_encoded_leaves_no_state() -> None:
    async def check() -> None:
        client = idle_client()
        engine = FakeEngine(client)
        with pytest.raises(OverflowError):
            client.submit([prompt("good", 1), prompt("bad", 2**70)])
        assert client.num_open == 0
        assert engine.received == []

    asyncio.run(check())


def test_requests_of_a_step_that_raised_count_as_in_flight() -> None:
    async def check() -> None:
        client = idle_client()
        engine = FakeEngine(client)
        for attempt in range(MAX_DEATHS):
            failing, passing = f"failing-{attempt}", f"passing-{attempt}"
            stream = client.submit([prompt(failing, 1)])
            other = client.submit([prompt(passing, 2)])
            done = [Update(f"{passing}{end}", finish_reason="length") for end in ("", "#1")]
            engine.report(report_of(*done))
            engine.report(report_of(*(Update(f"{failing}{end}", finish_reason="error") for end in ("", "#1"))))
            for one in (stream, other):
                async for _ in one:
                    pass
            client.requests.record_death()
        with pytest.raises(InvalidParameter):
            client.submit([prompt("again", 1)])
        client.submit([prompt("again", 2)])

    asyncio.run(check())


def report_of(*updates: Update) -> StepReport:
    return StepReport(list(updates), running=0, waiting=0, used_blocks=0, total_blocks=9, preemptions=0)


def test_quarantine_ends_with_success_or_after_a_while() -> None:
    now = 0.0
    quarantine = Quarantine(lambda: now)
    for _ in range(2):
        quarantine.record_death([b"bad", b"bad"])
        quarantine.record_death([b"finished"])
        quarantine.clear(b"finished")
    quarantine.check(b"finished")
    quarantine.check(b"unknown")
    with pytest.raises(InvalidParameter):
        quarantine.check(b"bad")
    now = FORGET_SECONDS + 1
    quarantine.record_death([b"new"])
    quarantine.check(b"bad")
    quarantine.record_death(str(number).encode() for number in range(MAX_SUSPECTS + 10))
    assert len(quarantine._suspects) == MAX_SUSPECTS


def test_stale_socket_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as opened:
        in_use = make_socket_folder(opened)
        (in_use / "commands").touch()
        stale, new, of_others, with_files, file = (
            tmp_path / name for name in ("chairlift-a", "chairlift-b", "other-c", "chairlift-d", "chairlift-e")
        )
        for folder in (stale, new, of_others, with_files):
            folder.mkdir()
            (folder / "reports").touch()
        (with_files / "notes.txt").touch()
        file.touch()
        for path in (in_use, stale, of_others, with_files, file):
            os.utime(path, (0, 0))
        remove_stale_folders()
        assert set(tmp_path.iterdir()) == {in_use, new, of_others, with_files, file}
    assert not in_use.exists()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: socket paths are limited to about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="lift") as folder:
        yield Path(folder)


def test_stop_does_not_wait_for_an_engine_that_never_connected(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    folder = short_folder
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def check() -> None:
        client = idle_client()
        await client.start()
        async with asyncio.timeout(30):
            while (handle := client._handle) is None:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(client.stop(), 30)
        assert not Path(f"/proc/{handle.process.pid}").exists()
        assert list(folder.iterdir()) == []

    asyncio.run(check())


def test_an_engine_that_cannot_be_started_fails_permanently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    restarts: list[None] = []

    async def check() -> None:
        care = Supervision(max_restarts=2, first_backoff=0.01)
        client = idle_client(supervision=care, on_restart=lambda: restarts.append(None))
        await client.start()
        assert await asyncio.wait_for(client.wait_until_settled(), 30) is EngineState.FAILED
        await client.stop()
        assert list(folder.iterdir()) == []

    asyncio.run(check())
    assert len(restarts) == 2
