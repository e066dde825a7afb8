"""The driver of a batch on Ray: shards, workers that die, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift.cluster import batch as driver
from chairlift.cluster.batch import MAX_DEATHS, RayBatch, WorkerResources, choose_resources
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.server.batch.input import Shard, shard_folder
from chairlift.server.batch.output import BatchCounts
from chairlift.server.batch.run import BatchResponse, BatchRun
from chairlift.server.config import ServerConfig
from tests.cluster.fake_ray import FakeRay, RayError

OK = BatchResponse(200, "r", b'{"usage":{"completion_tokens":3}}', output_tokens=3)


def write_input(path: Path, count: int) -> Path:
    lines = [
        {"custom_id": str(index), "url": "/v1/completions", "body": {"user": str(index)}} for index in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def worker_class(answer: Callable[[str], BatchResponse], on_start: Callable[[], None] = lambda: None) -> type:
    """A worker whose engine is a function of a request's user."""

    class Worker:
        def __init__(self, config: Any, concurrency: int, num_threads: int, version: str) -> None: ...

        def start(self) -> None:
            on_start()

        async def answer(self, shard: Shard, source: Path, target: Path) -> None:
            async def send(path: str, body: bytes) -> BatchResponse:
                return answer(json.loads(body)["user"])

            try:
                await BatchRun(source, target, concurrency=1, ranges=shard.ranges).run(send, lambda _: None)
            except* RayError as errors:
                raise errors.exceptions[0] from None

        def progress(self) -> BatchCounts:
            return BatchCounts()

        def stop(self) -> None: ...

    return Worker


def run_batch(
    tmp_path: Path, workers: type, monkeypatch: pytest.MonkeyPatch, count: int = 20
) -> tuple[BatchRun, FakeRay]:
    ray = FakeRay()
    monkeypatch.setattr(driver, "import_ray", lambda: ray)
    source = tmp_path / "in.jsonl"
    if not source.exists():
        write_input(source, count)
    run = BatchRun(source, tmp_path / "out.jsonl", concurrency=1)
    try:
        RayBatch(run, ServerConfig("tiny"), WorkerResources(2, 1, 0), 1, workers).run(lambda _: None)
    finally:
        run.output.close()
    return run, ray


def ids(tmp_path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_every_line_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ray = run_batch(tmp_path, worker_class(lambda user: OK), monkeypatch)
    assert sorted(ids(tmp_path), key=int) == [str(index) for index in range(20)]
    assert run.counts == BatchCounts(answered=20, output_tokens=60)
    assert run.is_complete
    assert (ray.num_actors, ray.num_killed) == (2, 2)
    assert not shard_folder(tmp_path / "out.jsonl").exists()


def test_shards_of_a_dead_worker_are_continued_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    deaths = iter([3, 11])
    next_death = [next(deaths)]

    def answer(user: str) -> BatchResponse:
        if len(computed) == next_death[0]:
            next_death[0] = next(deaths, -1)
            raise RayError("killed")
        computed.append(user)
        return OK

    run, ray = run_batch(tmp_path, worker_class(answer), monkeypatch)
    assert sorted(computed, key=int) == [str(index) for index in range(20)]  # none twice
    assert sorted(ids(tmp_path), key=int) == [str(index) for index in range(20)]
    assert run.counts.answered == 20
    assert ray.num_actors == 2 + 2


def test_a_worker_whose_engine_failed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([EngineDead("the engine failed")])

    def answer(user: str) -> BatchResponse:
        if user == "7" and (failure := next(failures, None)) is not None:
            raise failure
        return OK

    run, ray = run_batch(tmp_path, worker_class(answer), monkeypatch)
    assert sorted(ids(tmp_path), key=int) == [str(index) for index in range(20)]
    assert run.is_complete
    assert ray.num_actors == 2 + 1


def test_requests_that_kill_every_worker_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_deaths = 0

    def answer(user: str) -> BatchResponse:
        nonlocal num_deaths
        if user == "7":
            num_deaths += 1
            raise RayError("killed")
        return OK

    with pytest.raises(ChairliftError, match="3 workers in a row died with the same requests: killed"):
        run_batch(tmp_path, worker_class(answer), monkeypatch)
    assert num_deaths == MAX_DEATHS
    # What was answered is kept, and the next run answers only the rest.
    computed: list[str] = []
    run, _ = run_batch(tmp_path, worker_class(lambda user: computed.append(user) or OK), monkeypatch)  # type: ignore[func-returns-value]
    assert sorted(ids(tmp_path), key=int) == [str(index) for index in range(20)]
    assert run.done_before == 20 - len(computed)
    assert "7" in computed


def test_workers_that_cannot_start_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        raise RayError("no memory")

    with pytest.raises(ChairliftError, match="3 workers in a row died while they started: no memory"):
        run_batch(tmp_path, worker_class(lambda user: OK, die), monkeypatch)

    def fail() -> None:
        raise InvalidParameter("block_size", "is too large")

    with pytest.raises(InvalidParameter, match="block_size: is too large"):
        run_batch(tmp_path, worker_class(lambda user: OK, fail), monkeypatch)


def test_a_small_batch_needs_few_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ray = run_batch(tmp_path, worker_class(lambda user: OK), monkeypatch, count=1)
    assert ray.num_actors == 1


@pytest.mark.parametrize(
    ("nodes", "device", "given", "expected"),
    [
        ([{"CPU": 2.0}], "auto", (None, None, None), (1, 2, 0)),
        ([{"CPU": 2.0}], "auto", (2, None, None), (2, 1, 0)),
        ([{"CPU": 8.0}] * 4, "cpu", (None, None, None), (4, 8, 0)),
        ([{"CPU": 8.0}] * 4, "cpu", (3, None, None), (3, 8, 0)),
        ([{"CPU": 8.0}] * 4, "cpu", (6, None, None), (6, 4, 0)),
        ([{"CPU": 8.0}] * 4, "cpu", (100, None, None), (100, 1, 0)),
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 4.0}], "auto", (None, None, None), (8, 1, 1)),
        ([{"CPU": 64.0, "GPU": 8.0}], "cuda", (None, 4, 2.0), (4, 4, 2)),
        ([{"CPU": 64.0, "GPU": 8.0}], "cpu", (2, None, None), (2, 32, 0)),
    ],
)
def test_what_a_worker_gets(
    nodes: list[dict[str, float]], device: str, given: tuple[Any, Any, Any], expected: tuple[int, int, float]
) -> None:
    chosen = choose_resources(nodes, device, *given)
    assert (chosen.num_workers, chosen.cpus, chosen.gpus) == expected
    assert chosen.num_fitting(nodes) == min(chosen.num_workers, 32 if given[0] == 100 else 100)


@pytest.mark.parametrize(
    ("device", "gpus", "parameter"), [("cuda", None, "device"), ("cuda:1", None, "device"), ("cpu", 1.0, "worker_gpus")]
)
def test_devices_that_workers_cannot_have(device: str, gpus: float | None, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        choose_resources([{"CPU": 2.0}], device, None, None, gpus)
    assert error.value.parameter == parameter
