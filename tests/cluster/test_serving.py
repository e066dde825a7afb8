"""A fleet of two replicas on Ray Serve behaves like one server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.running_fleet import RunningFleet, processes_of, start_fleet
from tests.server.running_server import HTTP, NAME, wait_for
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")

GREEDY = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny", positions=2048)
    running = start_fleet(folder, folder.parent / "log")
    yield running
    assert running.stop() == 0, running.tail()
    assert processes_of(running.home) == []


def test_responses_are_those_of_a_server(fleet: RunningFleet) -> None:
    fleet.wait_for_replicas(2)
    client = fleet.client()
    whole = client.completions.create(prompt="the lift", max_tokens=8, **GREEDY)
    pieces = client.completions.create(prompt="the lift", max_tokens=8, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [model.id for model in client.models.list().data] == [NAME]
    assert fleet.get("/health").json() == {"status": "ok"}
    missing = fleet.post("/v1/completions", {"model": "other", "prompt": "hi"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert len(missing.headers.get_list("x-request-id")) == 1


def test_prompts_with_a_shared_prefix_go_to_one_replica(fleet: RunningFleet) -> None:
    before = {one["id"]: one["load"]["prompt_tokens"] for one in fleet.replicas()}
    sent = 0
    for group in range(2):
        for index in range(4):
            prompt = f"group {group} " * 40 + f"number {index}"
            sent += fleet.client().completions.create(prompt=prompt, max_tokens=1, **GREEDY).usage.prompt_tokens

    def shares() -> list[int]:
        return [one["load"]["prompt_tokens"] - before[one["id"]] for one in fleet.replicas()]

    wait_for(lambda: sum(shares()) >= sent, "the replicas to report all prompts")
    assert min(shares()) > 0
    loads = [one["load"] for one in fleet.replicas()]
    assert sum(load["cached_tokens"] for load in loads) > 0.6 * sum(load["prompt_tokens"] for load in loads)


def test_a_client_that_leaves_cancels_on_the_replica(fleet: RunningFleet) -> None:
    def running() -> int:
        return sum(one["load"]["running"] for one in fleet.replicas())

    endless = {"prompt": "x", "max_tokens": 2000, "stream": True}
    streams = [fleet.client().completions.create(**endless, **GREEDY) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    wait_for(lambda: running() == 0, "the requests to be cancelled")
    assert sum(one["load"]["output_tokens"] for one in fleet.replicas()) < 4 * 2000


def test_status_shows_the_replicas(fleet: RunningFleet) -> None:
    shown = fleet.command("status", "--json")
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    assert (status["state"], status["router"], status["address"]) == ("running", "prefix-affine", fleet.url)
    assert [one["state"] for one in status["replicas"]] == ["ready", "ready"]
    assert "key" not in status["replicas"][0]


def test_metrics_and_the_dashboard_show_every_replica(fleet: RunningFleet) -> None:
    fleet.wait_for_replicas(2)
    ids = {one["id"] for one in fleet.replicas()}
    page = fleet.get("/metrics").text
    assert {name for name in ids if f'chairlift_engine_up{{replica="{name}"' in page} == ids
    assert page.count("# TYPE chairlift_engine_up gauge") == 1
    assert fleet.metric("chairlift_fleet_replica_up") == 2
    assert "Chairlift fleet" in fleet.get("/dashboard").text
    seen: set[str] = set()
    with HTTP.stream("GET", f"{fleet.url}/dashboard/stream") as response:
        for line in response.iter_lines():
            frame = json.loads(line[6:]) if line.startswith("data: ") else {}
            if frame.get("t") == "replica" and frame["frame"]["t"] == "key":  # recorded by its engine
                seen.add(frame["id"])
            if seen == ids:
                break


def test_a_killed_replica_costs_no_request_and_is_replaced(fleet: RunningFleet) -> None:
    fleet.wait_for_replicas(2)
    old = {one["pid"] for one in fleet.replicas()}
    killed = min(old)
    os.kill(killed, signal.SIGKILL)
    client = fleet.client()
    for index in range(10):
        client.completions.create(prompt=f"request {index}", max_tokens=2, **GREEDY)
    wait_for(lambda: killed not in {one["pid"] for one in fleet.replicas()}, "the replica to be removed")
    fleet.wait_for_replicas(2)


def test_a_folder_for_files_is_refused(tmp_path: Path) -> None:
    from chairlift.cluster.serving.fleet import fleet_config
    from chairlift.errors import InvalidParameter
    from chairlift.server.options import ServerOptions

    with pytest.raises(InvalidParameter, match="files_dir"):
        fleet_config(ServerOptions(files_dir=tmp_path), "tiny", {})
