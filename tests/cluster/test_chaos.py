"""Replicas, engines and the ingress are killed, and replicas replaced, while clients send requests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.load import COMPLETE, CUT, ERROR_EVENT, Load
from tests.cluster.running_fleet import RunningFleet, start_fleet
from tests.server.running_server import NAME, wait_for
from tests.tiny import write_tiny_checkpoint

pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("chaos") / "tiny", positions=2048)


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[RunningFleet]:
    running = start_fleet(folder, folder.parent / "log")
    running.wait_for_replicas(2)
    yield running
    assert running.stop() == 0, running.tail()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def ingress_pid(fleet: RunningFleet) -> int:
    """The process that listens on the fleet's port."""
    port = f":{int(fleet.url.rsplit(':', 1)[1]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {line.split()[9] for line in lines if line.split()[1].endswith(port) and line.split()[3] == "0A"}
    for folder in Path("/proc").iterdir():
        try:
            links = [os.readlink(one) for one in (folder / "fd").iterdir()] if folder.name.isdigit() else []
        except OSError:
            continue
        if any(f"socket:[{inode}]" in links for inode in inodes):
            return int(folder.name)
    raise AssertionError("no process listens on the fleet's port")


def victim(fleet: RunningFleet, kind: str) -> int:
    server: int = fleet.replicas()[0]["pid"]
    return {"server": server, "actor": parent(server), "engine": children(server)[0]}[kind]


@pytest.mark.parametrize("kind", ["server", "actor", "engine"])
def test_only_streams_that_had_begun_notice_a_killed_replica(fleet: RunningFleet, kind: str) -> None:
    fleet.wait_for_replicas(2)
    with Load(fleet.url) as load:
        wait_for(lambda: load.num_complete() > 20, "the load to begin")
        killed = victim(fleet, kind)
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        complete = load.num_complete()
        wait_for(lambda: not Path(f"/proc/{killed}").exists(), "the process to end")
        time.sleep(3)
        fleet.wait_for_replicas(2)
        print(f"\nkilled the {kind}: two replicas again after {time.monotonic() - began:.1f} s")
        wait_for(lambda: load.num_complete() > complete + 20, "requests after the kill")
    print(dict(load.whole), dict(load.streams))
    assert set(load.whole) == {"200"}, load.details
    assert set(load.streams) <= {COMPLETE, ERROR_EVENT}, load.details
    assert load.streams[ERROR_EVENT] <= 3, "there were three streams at most when the replica died"


def test_the_ingress_comes_back(fleet: RunningFleet) -> None:
    fleet.wait_for_replicas(2)
    with Load(fleet.url, retry=True) as load:
        wait_for(lambda: load.num_complete() > 20, "the load to begin")
        os.kill(ingress_pid(fleet), signal.SIGKILL)
        killed, complete = time.monotonic(), load.num_complete()
        wait_for(lambda: load.num_complete() > complete + 20, "requests after the kill")
        print(f"\nkilled the ingress: answers again after {load.last_success - killed:.1f} s at most")
    print(dict(load.whole), dict(load.streams))
    assert set(load.whole) == {"200"}, load.details
    assert set(load.streams) <= {COMPLETE, CUT, "broken"}, load.details
    assert load.streams[CUT] <= 3, load.details


def test_a_rolling_update_costs_no_request(fleet: RunningFleet, folder: Path) -> None:
    fleet.wait_for_replicas(2)
    old = {one["version"] for one in fleet.replicas()}
    with Load(fleet.url) as load:
        wait_for(lambda: load.num_complete() > 20, "the load to begin")
        done = fleet.command("serve", *fleet.arguments, "--address", "auto", "--detach", "--max-batch-requests", "7")
        assert done.returncode == 0, done.stderr
        wait_for(
            lambda: len(fleet.replicas()) == 2 and not old & {one["version"] for one in fleet.replicas()},
            "replicas of the new version",
        )
        fleet.wait_for_replicas(2)
        complete = load.num_complete()
        wait_for(lambda: load.num_complete() > complete + 20, "requests after the update")
    print("\n", dict(load.whole), dict(load.streams))
    assert set(load.whole) == {"200"}, load.details
    assert set(load.streams) == {COMPLETE}, load.details


def test_an_idle_fleet_shrinks_to_nothing_and_the_next_request_wakes_it(folder: Path) -> None:
    sizes = ["--min-replicas", "0", "--max-replicas", "1", "--down-delay", "1", "--cold-start", "5"]
    fleet = start_fleet(folder, folder.parent / "zero", *sizes, replicas=1)
    try:
        wait_for(lambda: not fleet.replicas(), "the fleet to shrink")
        assert fleet.get("/health").status_code == 503
        response = fleet.client().completions.create(model=NAME, prompt="hello", max_tokens=2)
        assert response.usage is not None
        assert response.usage.completion_tokens == 2
    finally:
        assert fleet.stop() == 0, fleet.tail()
