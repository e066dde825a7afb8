"""`chairlift batch --ray` on a real Ray: each line gets one response, whatever is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.server.batch.input import shard_files, shard_folder
from tests.cluster.own_ray import OwnRay, own_ray
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")

CONCURRENCY = 8
# Runs a batch whose workers note the custom_id of each request that they send to their engine.
COUNTING_DRIVER = """
import json, os, sys
from pathlib import Path

from chairlift.cluster.batch import RayBatch
from chairlift.cluster.batch import WorkerResources
from chairlift.cluster.batch import BatchWorker
from chairlift.cluster.ray_runtime import connect
from chairlift.server.batch.run import BatchRun
from chairlift.server.config import ServerConfig

source, target, model, notes = sys.argv[1:]

class CountingWorker(BatchWorker):
    async def start(self):
        await super().start()
        send = self._send

        async def note_and_send(path, body):
            file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (json.loads(body)["user"] + "\\n").encode())
            os.close(file)
            return await send(path, body)

        self._send = note_and_send

config = ServerConfig(model, ["tiny"], {"device": "cpu", "kv_memory": "2MiB"}, quiet=True, log_level="warning")
connect()
run = BatchRun(Path(source), Path(target), concurrency=1)
RayBatch(run, config, WorkerResources(2, 1, 0), %d, CountingWorker).run(lambda _: None)
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[OwnRay]:
    with own_ray() as ray:
        yield ray


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def write_input(path: Path, count: int, max_tokens: int) -> Path:
    lines = []
    for index in range(count):
        body = {"model": "tiny", "prompt": [10 + index % 300], "max_tokens": max_tokens, "ignore_eos": True}
        lines.append({"custom_id": str(index), "url": "/v1/completions", "body": body | {"user": str(index)}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def num_written(target: Path) -> int:
    """The responses in the output and in the files of shards."""
    count = 0
    for path in [target, *shard_files(target)]:
        try:
            count += path.read_bytes().count(b"\n")
        except FileNotFoundError:
            continue  # it was moved to the output
    return count


def wait_for(target: Path, count: int, process: subprocess.Popen[Any], log: Path) -> None:
    end = time.monotonic() + 300
    while num_written(target) < count:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)


def check_output(target: Path, count: int, num_tokens: int) -> None:
    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(str(index) for index in range(count))
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == num_tokens for line in lines)
    assert len({line["id"] for line in lines}) == count
    assert not shard_folder(target).exists()


@pytest.mark.slow
def test_a_batch_on_two_workers_survives_the_death_of_one(ray: OwnRay, tiny: str, tmp_path: Path) -> None:
    source, target, log = write_input(tmp_path / "in.jsonl", 120, 16), tmp_path / "out.jsonl", tmp_path / "log"
    options = ["--model", tiny, "--served-model-name", "tiny", "--device", "cpu", "--kv-memory", "2MiB"]
    options += ["--ray", "--workers", "2", "--worker-cpus", "1", "--concurrency", str(CONCURRENCY)]
    command = [sys.executable, "-m", "chairlift", "batch", str(source), str(target), *options]
    with log.open("wb") as notes:
        process = subprocess.Popen(command, env=ray.environment, stdout=notes, stderr=notes)
    wait_for(target, 20, process, log)
    workers = ray.pids("ray::BatchWorker")
    assert workers
    ray.kill(workers[0])
    assert process.wait(timeout=300) == 0, log.read_text()
    assert "120 answered, 0 failed, 1,920 tokens generated" in log.read_text()
    check_output(target, 120, 16)
    assert not ray.pids("ray::")


@pytest.mark.slow
def test_killed_workers_and_drivers_repeat_only_what_was_in_flight(ray: OwnRay, tiny: str, tmp_path: Path) -> None:
    source, target, log = write_input(tmp_path / "in.jsonl", 1000, 12), tmp_path / "out.jsonl", tmp_path / "log"
    notes, chance = tmp_path / "sent", random.Random()
    driver = tmp_path / "driver.py"
    driver.write_text(COUNTING_DRIVER % CONCURRENCY)
    command = [sys.executable, str(driver), str(source), str(target), tiny, str(notes)]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(command, env=ray.environment, stdout=file, stderr=file)

    process = start()
    wait_for(target, chance.randrange(50, 250), process, log)
    ray.kill(chance.choice(ray.pids("ray::CountingWorker")))
    wait_for(target, chance.randrange(350, 600), process, log)
    process.kill()
    process.wait()
    process = start()
    assert process.wait(timeout=300) == 0, log.read_text()
    check_output(target, 1000, 12)
    sent = Counter(notes.read_text().split())
    assert len(sent) == 1000
    num_repeated = sent.total() - 1000
    print(f"{num_repeated} of 1,000 requests were sent twice")
    # One worker died with its requests in flight, and then both; requests still in line were never sent.
    assert num_repeated <= 0.05 * 1000
