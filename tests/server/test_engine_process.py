"""The loop of the engine process, driven by the test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.server.process.engine_process import EngineProcess, _failure
from chairlift.server.wire.messages import (
    Cancel,
    FailedToLoad,
    Loaded,
    StepReport,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)

SHORT, LONG = [7, 8, 9], [11] * 100


class EngineDriver:
    """Sends messages to an engine process and runs one iteration of its loop at a time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.context = zmq.Context()
        self.commands, self.reports = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        settings = {
            "model": str(model),
            "engine": {"max_batch_requests": 4, "max_batch_tokens": 8, "kv_memory": "2MiB"},
            "parent": os.getppid(),
        }
        for name, socket in (("commands", self.commands), ("reports", self.reports)):
            settings[name] = f"ipc://{folder / name}"
            socket.bind(settings[name])
        self.process = EngineProcess(settings)
        self.process._load()
        while not isinstance(decode_from_engine(self.reports.recv()), Loaded):
            pass

    def send(self, message: ToEngine) -> None:
        self.commands.send(encode(message))
        assert self.process.inbox.poll(10_000)  # wait for the message, so that timing does not matter,
        self.process._receive_messages(0)  # and take it, so that the next message is waited for, too

    def turn(self) -> StepReport:
        self.process._turn()
        assert self.reports.poll(10_000)
        report = decode_from_engine(self.reports.recv())
        assert isinstance(report, StepReport)
        return report

    def close(self) -> None:
        self.process.engine.shut_down()
        self.process.context.destroy(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[EngineDriver]:
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need
        by_hand = EngineDriver(tiny_folder, Path(folder))
        yield by_hand
        by_hand.close()


def endless(request_id: str, prompt: list[int], n: int = 1) -> Submit:
    params = SamplingParams(n=n, max_tokens=60, ignore_eos=True, temperature=1.0, seed=1)
    return Submit(request_id, prompt, params, None, request_id)  # its own salt: no prefix is cached


def computing_prompts(report: StepReport) -> bool:
    return report.prefill_tokens > 0


def decoding(report: StepReport) -> bool:
    return report.decode_tokens > 0


def queueing(report: StepReport) -> bool:
    return report.waiting >= 2


PHASES: dict[str, tuple[list[Submit], Callable[[StepReport], bool]]] = {
    "prefill": ([endless("a", LONG)], computing_prompts),
    "decode": ([endless("b", SHORT)], decoding),
    "between children": ([endless("c", LONG, 3)], computing_prompts),
    "children": ([endless("d", SHORT, 3)], decoding),
    "queue": ([endless("e", SHORT, 4), endless("f", LONG, 2)], queueing),
}


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_computed_for_cancelled_requests(engine: EngineDriver, phase: str) -> None:
    requests, reached = PHASES[phase]
    for request in requests:
        engine.send(request)
    while not reached(engine.turn()):
        pass
    names = [
        request.request_id + (f"#{child}" if child else "") for request in requests for child in range(request.params.n)
    ]
    engine.send(Cancel(names))
    last = engine.turn()
    assert last.requests == last.prefill_tokens == last.decode_tokens == 0
    assert last.used_blocks == last.waiting == 0
    assert {update.request_id: update.finish_reason for update in last.updates} == dict.fromkeys(names, "cancelled")
    assert not engine.process.engine.has_work


def test_other_requests_continue_in_the_same_step(engine: EngineDriver) -> None:
    engine.send(endless("gone", SHORT))
    engine.send(endless("stays", SHORT))
    while engine.turn().decode_tokens < 2:
        pass
    engine.send(Cancel(["gone"]))
    following = engine.turn()
    assert following.requests == following.decode_tokens == 1
    engine.send(Cancel(["stays"]))
    engine.turn()
    assert not engine.process.engine.has_work


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidParameter("kv_memory", "is too much"), FailedToLoad("is too much", "kv_memory")),
        (CorruptCheckpoint("a.gguf: is damaged"), FailedToLoad("a.gguf: is damaged")),
        (PermissionError(13, "Permission denied", "a.gguf"), FailedToLoad("[Errno 13] Permission denied: 'a.gguf'")),
        (ZeroDivisionError("a defect"), FailedToLoad("ZeroDivisionError: a defect")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_prevents_loading_is_reported(error: Exception, expected: FailedToLoad) -> None:
    assert _failure(error) == expected


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")]
)
def test_a_lack_of_memory_is_reported_as_such(error: Exception) -> None:
    assert "not enough memory" in _failure(error).problem
