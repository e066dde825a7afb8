"""Tokenization: after admission, in two pools, cancelled with the client."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from chairlift.server.generation.tokenizer_pool import FairThreads, TokenizerPool
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Submit
from tests.server.front_end import NAME
from tests.server.running_server import HTTP, wait_for
from tests.server.stuck_tokenizer import LONG_TEXT, PATH, post_prompt, preparing, stuck_on_long_texts


def test_long_texts_do_not_delay_short_ones_and_count_against_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, Limits(max_waiting=0)) as (front, go_on):
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT))) for _ in range(7)]
        for thread in threads:
            thread.start()
        wait_for(lambda: preparing(front) == 7, "the long requests to be admitted")
        assert post_prompt(front, "short") == 200
        assert HTTP.post(front.url + "/tokenize", json={"prompt": "short"}).status_code == 200
        last = threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT)))
        last.start()
        wait_for(lambda: preparing(front) == 8, "the last slot to be reserved")
        assert post_prompt(front, "short") == 429  # before it is tokenized
        go_on.set()
        for thread in (*threads, last):
            thread.join(60)
        assert statuses == [200] * 8
        assert preparing(front) == 0
        assert post_prompt(front, "short") == 200


def test_a_client_that_disconnects_while_its_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_on_long_texts(monkeypatch, Limits()) as (front, go_on):
        body = json.dumps({"model": NAME, "prompt": LONG_TEXT}).encode()
        connection = front.connect()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        connection.sendall(head.encode() + b"\r\n" + body)
        wait_for(lambda: preparing(front) == 1, "the request to be admitted")
        connection.close()
        wait_for(lambda: preparing(front) == 0, "its reservation to be released")
        go_on.set()
        assert post_prompt(front, "short") == 200
        assert [message.prompt for message in front.engine.received if isinstance(message, Submit)] != [[7]]


def test_an_engine_that_dies_during_tokenization_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.server.process.engine_client import EngineState

    with stuck_on_long_texts(monkeypatch, Limits()) as (front, go_on):
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(post_prompt(front, LONG_TEXT)))
        thread.start()
        wait_for(lambda: preparing(front) == 1, "the request to be admitted")
        front.engine.state = EngineState.RESTARTING
        go_on.set()
        thread.join(60)
        assert statuses == [503]
        assert post_prompt(front, "short") == 503


@pytest.mark.parametrize(("path", "status"), [("/tokenize", 200), (PATH, 400)])  # too long for this model
def test_long_texts_of_one_tenant_do_not_delay_those_of_another(
    monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    def post(key: str, text: str) -> int:
        body = {"prompt": text, "model": NAME}
        return HTTP.post(front.url + path, json=body, headers={"authorization": f"Bearer {key}"}).status_code

    with stuck_on_long_texts(monkeypatch, Limits(), api_keys=["alice one", "bob two"]) as (front, go_on):
        pool, statuses = front.service.tokenizer_pool, list[int]()
        jobs = pool._text_jobs if path == "/tokenize" else pool._long
        threads = [threading.Thread(target=lambda: statuses.append(post("one", LONG_TEXT))) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: jobs._running["alice"] + len(jobs._waiting.get("alice", ())) == 4, "the long texts")
        assert post("two", LONG_TEXT[:22_000]) == status  # not short, and not stuck
        assert not statuses
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert statuses == [200] * 4


def test_jobs_take_turns_by_size_and_cancelled_ones_are_not_run() -> None:
    async def scenario() -> list[str]:
        threads, done = FairThreads("test", 1), list[str]()
        go_on, end = threading.Event(), threading.Event()

        def start(tenant: str, size: int, name: str, after: threading.Event) -> asyncio.Task[None]:
            def job() -> None:
                assert after.wait(60)
                done.append(name)

            return asyncio.create_task(threads.run(tenant, size, job))

        first, last = start("c", 1, "c", go_on), start("d", 1, "d", end)  # which occupy the threads
        await asyncio.sleep(0)
        tasks = [start("a", 50_000, name, go_on) for name in ("a1", "a2")]
        tasks += [start("b", 1_000, name, go_on) for name in ("b1", "b2", "b3")]
        left = start("a", 1, "left", go_on)
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        go_on.set()
        await asyncio.gather(first, *tasks)
        end.set()
        await last
        assert not threads._running
        assert not threads._waiting
        assert not threads._served
        return done

    assert asyncio.run(scenario()) == ["c", "a1", "b1", "b2", "b3", "a2", "d"]


def test_an_error_of_a_job_reaches_its_caller() -> None:
    async def scenario() -> None:
        threads = FairThreads("test", 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run("", 1, lambda: 1 // 0)
        assert await threads.run("", 1, lambda: 7) == 7

    asyncio.run(scenario())


def test_images_do_not_delay_texts() -> None:
    async def run() -> None:
        pool, fetched = TokenizerPool(), threading.Event()
        images = [asyncio.create_task(pool.run("", 10, fetched.wait, images=True)) for _ in range(4)]
        images.append(asyncio.create_task(pool.run_text_job("", 10, fetched.wait, images=True)))
        await asyncio.sleep(0)
        assert await pool.run("", 10, lambda: "text") == "text"
        assert await pool.run_text_job("", 10, lambda: "text") == "text"
        fetched.set()
        assert all(await asyncio.gather(*images))

    asyncio.run(run())
