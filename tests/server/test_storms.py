"""Hundreds of clients, some slow or disconnecting, on one server, which holds nothing afterwards."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.raw_client import Answer, RawClient, post
from tests.server.running_server import NAME, RunningServer, start_server, wait_for

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def storm(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ("--max-waiting", "1000", "--heartbeat-timeout", "60", "--max-batch-requests", "32")
    server = start_server(tiny_folder, tmp_path_factory.mktemp("storm") / "log", *options)
    yield server
    assert server.stop() == 0, server.tail()


@pytest.fixture(autouse=True)
def check_nothing_leaks(storm: RunningServer) -> Iterator[None]:
    """Checks that blocks, open completions and file descriptors of both processes are as before."""
    storm.post(PATH, {"model": NAME, "prompt": "warm", "max_tokens": 2})
    engine = storm.engine_pid()
    wait_for(lambda: connections(storm) == 0, "old connections to be closed")
    before = open_files(storm.process.pid), open_files(engine)
    yield
    storm.wait_idle()
    assert storm.metric("chairlift_requests_open") == storm.metric("chairlift_requests_waiting") == 0
    assert storm.engine_pid() == engine, "the engine was restarted"
    wait_for(lambda: open_files(storm.process.pid) <= before[0], "the front end's files to be closed")
    assert open_files(engine) <= before[1]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def connections(server: RunningServer) -> int:
    """The number of client connections to the server's port."""
    port = int(server.url.rsplit(":", 1)[1])
    lines = Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]
    return sum(fields[1].endswith(f":{port:04X}") and fields[3] == "01" for fields in map(str.split, lines))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def greedy(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **more}


def test_500_streams_get_their_own_responses(storm: RunningServer, tiny_folder: Path) -> None:
    """Half of the streams must repeat their own token their own number of times; the others must get the same output
    as their prompt alone."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    marked = [(100 + index % 125, 6 + index // 125) for index in range(250)]
    prompts = [f"canary number {index}" for index in range(50)]
    url = storm.url + PATH

    async def run_all() -> tuple[list[Answer], list[Answer], list[Answer]]:
        alone = [await post(url, greedy(prompt, max_tokens=8)) for prompt in prompts]
        forced = [greedy("sing", max_tokens=count, logit_bias={str(token): 100}) for token, count in marked]
        natural = [greedy(prompts[index % 50], max_tokens=8) for index in range(250)]
        together = [asyncio.create_task(post(url, body)) for pair in zip(forced, natural, strict=True) for body in pair]
        answers = await asyncio.gather(*together)
        return alone, answers[0::2], answers[1::2]

    alone, forced, natural = asyncio.run(run_all())
    assert len({answer.text for answer in alone}) > 40, "the answers depend too little on the prompts"
    for (token, count), answer in zip(marked, forced, strict=True):
        assert answer.complete
        assert answer.text == tokenizer.decode([token] * count)
    for index, answer in enumerate(natural):
        assert answer.complete
        assert answer.text == alone[index % 50].text


def test_300_clients_disconnect_mid_stream(storm: RunningServer) -> None:
    rng = random.Random(0)
    names = ("stop", "length", "cancelled", "error", "deadline", "refused")

    def ended() -> dict[str, float]:
        return {name: storm.metric_of("chairlift_requests_total", reason=name) for name in names}

    async def one(index: int) -> None:
        body = greedy(f"client {index}", max_tokens=200, n=1 + index % 3, stream=index % 4 != 0)
        client = await RawClient.post(storm.url + PATH, body)
        num_bytes = rng.choice([0, 1, 300, 3_000, 20_000])  # none to about half of a stream
        try:
            async with asyncio.timeout(rng.uniform(0.01, 2.0)):
                if num_bytes:
                    await client.reader.readexactly(num_bytes)
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
        client.reset() if index % 2 else client.close()

    async def run_all() -> None:
        for start in range(0, 300, 100):
            await asyncio.gather(*(one(index) for index in range(start, start + 100)))

    before = ended()
    asyncio.run(run_all())
    storm.wait_idle()
    wait_for(lambda: storm.metric("chairlift_requests_open") == 0, "all requests to end")
    grown = {name: count - before[name] for name, count in ended().items()}
    assert grown["error"] == grown["deadline"] == grown["refused"] == 0
    assert grown["cancelled"] > 100
    assert sum(grown.values()) <= 600
    assert storm.post(PATH, greedy("still there?", max_tokens=4, stream=False)).status_code == 200


def test_slow_readers_do_not_slow_down_others(storm: RunningServer) -> None:
    url = storm.url + PATH
    chatty = greedy("slowly", max_tokens=100, logprobs=20)

    async def read_slowly(client: RawClient) -> None:
        while True:
            await client.reader.readexactly(1)
            await asyncio.sleep(1)

    async def check() -> tuple[Answer, list[Answer], int]:
        alone = await post(url, greedy("quickly", max_tokens=32))
        before = resident_bytes(storm.process.pid)
        slow = [await RawClient.post(url, chatty, buffer=2048) for _ in range(20)]
        readers = [asyncio.create_task(read_slowly(client)) for client in slow]
        quick = [await post(url, greedy("quickly", max_tokens=32)) for _ in range(5)]
        # The engine has finished the slow requests; their output is buffered.
        while storm.metric("chairlift_requests_open"):
            await asyncio.sleep(0.05)
        quick += [await post(url, greedy("quickly", max_tokens=32)) for _ in range(5)]
        grown = resident_bytes(storm.process.pid) - before
        assert not any(task.done() for task in readers), "a slow reader was disconnected"
        for task, client in zip(readers, slow, strict=True):
            task.cancel()
            client.reset()
        return alone, quick, grown

    alone, quick, grown = asyncio.run(check())
    assert {answer.text for answer in quick} == {alone.text}
    assert all(answer.complete for answer in quick)
    assert grown < 50 * 2**20  # 20 responses of about 200 KB each, and their encoding
