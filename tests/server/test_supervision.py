"""Detection and restart of hung engines, with a fake engine process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.server.process.engine_client import EngineClient, EngineState, Supervision
from chairlift.server.wire.messages import Submit

SUPERVISION = Supervision(heartbeat_timeout=5.0, step_timeout=1.0, max_restarts=2, first_backoff=0.01)


@pytest.fixture
def make_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], EngineClient]:
    script = tmp_path / "engine"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent / "fake_engine.py"}" "$@"\n')
    script.chmod(0o755)
    (tmp_path / "notes").touch()

    def make(fault: str) -> EngineClient:
        monkeypatch.setattr(sys, "executable", str(script))
        return EngineClient(f"{fault}@{tmp_path / 'notes'}", {}, lambda report: None, lambda: None, SUPERVISION)

    return make


def num_starts(tmp_path: Path) -> int:
    return len((tmp_path / "notes").read_text().splitlines())


async def settled(client: EngineClient) -> EngineState:
    return await asyncio.wait_for(client.wait_until_settled(), 120)


@pytest.mark.parametrize("fault", ["hangs", pytest.param("silent", marks=pytest.mark.slow), "babbles"])
def test_a_hung_engine_is_replaced_and_its_requests_end(
    make_client: Callable[[str], EngineClient], tmp_path: Path, fault: str
) -> None:
    async def check() -> None:
        client = make_client(fault)
        await client.start()
        assert await settled(client) is EngineState.READY
        stream = client.submit([Submit("a", [1], SamplingParams(), None, "")])
        with pytest.raises(EngineDead):
            async with asyncio.timeout(120):
                await anext(aiter(stream))
        assert await settled(client) is EngineState.READY
        assert client.restarts == 1
        await client.stop()

    asyncio.run(check())
    assert num_starts(tmp_path) == 2


@pytest.mark.slow
def test_long_steps_and_a_suspended_front_end_are_not_faults(
    make_client: Callable[[str], EngineClient], tmp_path: Path
) -> None:
    async def check() -> None:
        client = make_client("well")
        await client.start()
        assert await settled(client) is EngineState.READY
        await asyncio.sleep(2 * SUPERVISION.step_timeout)
        time.sleep(1.5 * SUPERVISION.heartbeat_timeout)  # blocks the event loop, which receives no heartbeat
        await asyncio.sleep(0.5)
        assert client.state is EngineState.READY
        await client.stop()

    asyncio.run(check())
    assert num_starts(tmp_path) == 1


def test_an_engine_that_was_healthy_and_fails_to_reload_is_retried(
    make_client: Callable[[str], EngineClient], tmp_path: Path
) -> None:
    async def check() -> None:
        client = make_client("cannot load again")
        await client.start()
        assert await settled(client) is EngineState.READY
        assert client._handle is not None
        client._handle.process.kill()
        while client.state is EngineState.READY:
            await asyncio.sleep(0.01)
        assert await settled(client) is EngineState.FAILED
        assert "out of memory" in client.problem
        await client.stop()

    asyncio.run(check())
    assert num_starts(tmp_path) == 1 + SUPERVISION.max_restarts


@pytest.mark.parametrize(("fault", "problem"), [("out of memory", "ran out of memory"), ("exits", "status 3")])
def test_an_engine_that_dies_while_it_loads_is_not_started_again(
    make_client: Callable[[str], EngineClient], tmp_path: Path, fault: str, problem: str
) -> None:
    async def check() -> None:
        client = make_client(fault)
        await client.start()
        assert await settled(client) is EngineState.FAILED
        assert problem in client.problem
        await client.stop()

    asyncio.run(check())
    assert num_starts(tmp_path) == 1


def test_a_request_that_killed_the_engine_twice_is_refused(
    make_client: Callable[[str], EngineClient], tmp_path: Path
) -> None:
    def request(token: int, name: str) -> Submit:
        return Submit(name, [token], SamplingParams(), timeout=None, cache_salt=name, tenant=name)

    async def check() -> None:
        client = make_client("dies of requests")
        await client.start()
        for attempt in range(2):
            assert await settled(client) is EngineState.READY
            stream = client.submit([request(666, f"bad-{attempt}")])
            with pytest.raises(EngineDead):
                async with asyncio.timeout(60):
                    await anext(aiter(stream))
            while client.state is EngineState.READY:
                await asyncio.sleep(0.01)
        assert await settled(client) is EngineState.READY
        with pytest.raises(InvalidParameter, match="in flight when the engine died 2 times"):
            client.submit([request(1, "good"), request(666, "bad-again")])
        assert client.num_open == 0
        async with asyncio.timeout(60):
            assert (await anext(aiter(client.submit([request(1, "good")]))))[0].tokens == [1]
        await client.stop()

    asyncio.run(check())
    assert num_starts(tmp_path) == 3
