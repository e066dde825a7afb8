"""Requests are cancelled when their client disconnects, in every phase.

The engine is suspended and resumed in between, so that nothing depends on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.raw_client import RawClient
from tests.server.running_server import NAME, WAIT_SECONDS, RunningServer, start_server, wait_for
from tests.tiny import write_tiny_checkpoint

PATH = "/v1/completions"
# Long enough not to finish early.
ENDLESS = {"model": NAME, "max_tokens": 3000, "ignore_eos": True}
SHORT, LONG = [7, 8, 9], [11] * 4000
# The long prompt takes 500 steps, its output thousands. The engine's reaction to a cancellation is exact (see
# test_engine_process.py), but a busy machine may deliver the message late.
SOON = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with four slots, a queue of four, and prompts that take many steps."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("small") / "tiny", positions=8192)
    options = ["--max-batch-requests=4", "--max-waiting=4", "--max-batch-tokens=8", "--kv-memory=16MiB"]
    server = start_server(folder, folder.parent / "log", *options, "--heartbeat-timeout=300", "--drain-timeout=300")
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0, server.tail()


class Pause:
    """Suspends the engine; `until` resumes it briefly until a condition holds."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.pid = server.engine_pid()

    def __enter__(self) -> Pause:
        os.kill(self.pid, signal.SIGSTOP)
        self.settled_steps()
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, "the engine did not reach the condition"
            os.kill(self.pid, signal.SIGCONT)
            time.sleep(0.004)
            os.kill(self.pid, signal.SIGSTOP)
            self.settled_steps()

    def settled_steps(self) -> float:
        """The number of steps, once all reports from before the suspension have arrived."""
        steps = -1.0
        while steps != (steps := self.server.metric("chairlift_steps_total")):
            time.sleep(0.03)
        return steps


def tokens_generated(server: RunningServer) -> float:
    return server.metric("chairlift_output_tokens_total")


def decoding(server: RunningServer) -> Callable[[], bool]:
    before = tokens_generated(server)
    return lambda: tokens_generated(server) >= before + 2


def computing_prompts(server: RunningServer) -> Callable[[], bool]:
    def prefilled() -> float:
        return server.metric_of("chairlift_step_tokens_total", kind="prefill")

    before, generated = prefilled(), tokens_generated(server)

    def arrived() -> bool:
        assert tokens_generated(server) == generated, "the prompt was computed too soon"
        return prefilled() > before

    return arrived


def in_the_queue(server: RunningServer) -> Callable[[], bool]:
    return lambda: server.metric("chairlift_requests_waiting") >= 2


PHASES: dict[str, tuple[list[dict[str, Any]], Callable[[RunningServer], Callable[[], bool]]]] = {
    "prefill": ([{"prompt": LONG}], computing_prompts),
    "decode": ([{"prompt": SHORT}], decoding),
    "between children": ([{"prompt": LONG, "n": 3}], computing_prompts),
    "children": ([{"prompt": SHORT, "n": 3}], decoding),
    "several prompts": ([{"prompt": [SHORT, LONG, SHORT]}], decoding),
    "queue": ([{"prompt": SHORT, "n": 4}, {"prompt": LONG, "n": 2}], in_the_queue),
}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("phase", PHASES)
def test_no_more_is_computed_for_a_client_that_disconnects(small: RunningServer, phase: str, streamed: bool) -> None:
    bodies, reached = PHASES[phase]
    small.wait_idle()
    cancelled = small.metric_of("chairlift_requests_total", reason="cancelled")

    more = ENDLESS | {"stream": streamed, "cache_salt": f"{phase} {streamed}"}  # no prefix is cached

    async def clients() -> list[RawClient]:
        return [await RawClient.post(small.url + PATH, more | body) for body in bodies]

    async def check() -> float:
        with Pause(small) as engine:
            arrived = reached(small)
            connected = await clients()
            expected = sum(body.get("n", 1) * (3 if phase == "several prompts" else 1) for body in bodies)
            while small.metric("chairlift_requests_open") != expected:
                await asyncio.sleep(0.02)
            engine.until(arrived)
            assert small.metric("chairlift_requests_open") == expected
            steps = engine.settled_steps()
            for client in connected:
                client.reset()
            await asyncio.sleep(0)
            wait_for(lambda: small.metric("chairlift_requests_open") == 0, "the front end to cancel the requests")
        small.wait_idle()
        assert small.metric_of("chairlift_requests_total", reason="cancelled") == cancelled + expected
        return small.metric("chairlift_steps_total") - steps

    assert asyncio.run(check()) <= SOON


def test_a_full_queue_sets_retry_after_and_requests_that_never_fit_are_refused(small: RunningServer) -> None:
    never = small.post(PATH, ENDLESS | {"prompt": SHORT, "n": 9})
    assert never.status_code == 400
    assert never.json()["error"]["param"] == "n"
    never = small.post(PATH, ENDLESS | {"prompt": [SHORT] * 9})
    assert never.status_code == 400
    assert never.json()["error"]["param"] == "prompt"
    answers = []
    with Pause(small):
        body = ENDLESS | {"prompt": SHORT, "n": 8, "max_tokens": 2}
        full = threading.Thread(target=lambda: answers.append(small.post(PATH, body)))
        full.start()
        wait_for(lambda: small.metric("chairlift_requests_open") == 8, "the queue to fill")
        refused = small.post(PATH, ENDLESS | {"prompt": SHORT})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_full"
    full.join(60)
    assert len(answers[0].json()["choices"]) == 8


def test_a_second_signal_exits_at_once(small: RunningServer) -> None:
    """Must be the last test of this file, because it ends the server."""
    answers = []
    with Pause(small) as engine:  # so that no request can finish
        open_ = threading.Thread(target=lambda: answers.append(small.post(PATH, ENDLESS | {"prompt": SHORT})))
        open_.start()
        wait_for(lambda: small.metric("chairlift_requests_open") == 1, "the request to be admitted")
        small.process.send_signal(signal.SIGTERM)
        small.wait_until("/ready", 503)
        small.process.send_signal(signal.SIGINT)
        assert small.process.wait(60) == 128 + signal.SIGINT, small.tail()
        open_.join(30)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is shutting down"
        wait_for(lambda: not Path(f"/proc/{engine.pid}").exists(), "the engine process to exit")
        engine.pid = os.getpid()  # the engine process has exited
