"""The routing table of an ingress, the reports of replicas, and Ray Serve's autoscaling policy."""

from __future__ import annotations

import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.routing.router import RoutedRequest
from chairlift.cluster.serving.fleet import FleetScaling, observe
from chairlift.cluster.serving.routing_table import LoadReader, NoReplica, ReplicaInfo, ReplicaLoad, RoutingTable
from chairlift.errors import InvalidParameter

INFO = ReplicaInfo("http://127.0.0.1:1", "key", 1000, "1", 1, "node")
SMALL = RoutedRequest(10, 10)


def table_of(**loads: ReplicaLoad) -> RoutingTable:
    table = RoutingTable("least-loaded")
    table.update((name, INFO, load) for name, load in loads.items())
    return table


def test_replicas_come_and_go() -> None:
    table = RoutingTable("prefix-affine")
    with pytest.raises(NoReplica):
        table.route(SMALL)
    table.update([("a", INFO, None)])
    _, route = table.route(SMALL)
    table.update([("b", INFO, None)])
    assert table.route(SMALL)[0].id == "b"
    table.started(route)
    table.ended(route, 5)  # its replica is gone
    table.update([])
    with pytest.raises(NoReplica):
        table.route(SMALL)


def test_failing_restarting_and_avoided_replicas_are_the_last_choice() -> None:
    table = table_of(a=ReplicaLoad(), b=ReplicaLoad(is_ready=False), c=ReplicaLoad())
    assert {table.route(SMALL)[0].id for _ in range(6)} == {"a", "c"}
    table.failed("a")
    assert {table.route(SMALL)[0].id for _ in range(6)} == {"c"}
    assert {table.route(SMALL, {"c"})[0].id for _ in range(6)} <= {"a", "b"}
    assert table.route(SMALL, {"a", "b", "c"})[0].id in "abc"
    assert [one.state for one in table.replicas()] == ["failing", "restarting", "ready"]


def test_a_replica_is_chosen_again_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("chairlift.cluster.serving.routing_table.time.monotonic", lambda: now)
    table = table_of(a=ReplicaLoad(), b=ReplicaLoad(is_ready=False))
    assert {table.route(SMALL)[0].id for _ in range(4)} == {"a"}
    table.update([("a", INFO, ReplicaLoad()), ("b", INFO, ReplicaLoad())])
    table.failed("a")
    assert {table.route(SMALL)[0].id for _ in range(4)} == {"b"}
    now += 1000
    assert {table.route(SMALL)[0].id for _ in range(9)} == {"a", "b"}
    table.failed("b")
    table.update([("a", INFO, ReplicaLoad())])
    assert table.route(SMALL)[0].id == "a"


def test_load_that_others_cause_counts() -> None:
    table = table_of(a=ReplicaLoad(pending_tokens=5000), b=ReplicaLoad())
    assert [table.route(SMALL)[0].id for _ in range(5)] == ["b"] * 5
    table.update([("a", INFO, ReplicaLoad()), ("b", INFO, ReplicaLoad(pending_tokens=5000))])
    assert table.route(SMALL)[0].id == "a"


def test_a_replica_reads_its_own_metrics_without_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.cluster.serving.replica import ReplicaActor

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.headers["x-api-key"].encode())

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    replica = object.__new__(ReplicaActor)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request).start()
        replica._address, replica._key = f"http://127.0.0.1:{server.server_port}", "key"
        assert replica._metrics() == "key"


def exposition(**values: float) -> str:
    return "".join(f"chairlift_{name} {value}\n" for name, value in values.items())


def test_the_load_is_read_from_the_metrics() -> None:
    reader = LoadReader(block_size=16)
    reader.read(exposition(engine_up=1, time_to_first_token_seconds_sum=10, time_to_first_token_seconds_count=5))
    text = exposition(
        engine_up=1,
        requests_running=2,
        requests_waiting=3,
        kv_blocks_used=4,
        prompt_tokens_total=100,
        prompt_tokens_cached_total=25,
        output_tokens_total=60,
        requests_total=6,
        time_to_first_token_seconds_sum=12,
        time_to_first_token_seconds_count=10,
    )
    load = reader.read(text + 'chairlift_time_to_first_token_seconds_bucket{le="1"} 9\n')
    assert (load.is_ready, load.running, load.waiting, load.held_tokens) == (True, 2, 3, 64)
    assert (load.hit_rate, load.wait) == (0.25, pytest.approx(0.4))
    assert load.pending_tokens == 3 * (10 + 4 * 10) + 2 * 4 * 10 / 2
    assert ReplicaLoad.from_dict(asdict(load) | {"of another version": 1}) == load
    assert not LoadReader(16).read(exposition(engine_up=0)).is_ready


def context(ready: int, queued: float = 0.0, **stats: list[float]) -> SimpleNamespace:
    return SimpleNamespace(
        running_replicas=list(range(ready)),
        target_num_replicas=ready,
        total_queued_requests=queued,
        aggregated_metrics={name: dict(enumerate(values)) for name, values in stats.items()},
    )


def test_the_autoscaling_policy_observes_the_fleet() -> None:
    seen = observe(context(2, wait=[0.5, 3.0], used=[0.2, 0.6], tpot=[0.0, 0.1], open=[3, 4]))
    assert (seen.ready, seen.wait, seen.used, seen.tpot, seen.open_requests) == (2, 3.0, 0.4, 0.1, 7)
    assert observe(context(0, queued=2)).open_requests == 2


def test_the_autoscaling_policy_grows_and_wakes_a_fleet() -> None:
    settings = {"min_replicas": 0, "max_replicas": 8, "down_delay": 0.0}
    assert FleetScaling(**settings)(context(2, wait=[9.0, 9.0], used=[0.9, 0.9], open=[9, 9])) == (4, {})
    assert FleetScaling(**settings)(context(0, queued=1)) == (1, {})
    assert FleetScaling(**settings)(context(0)) == (0, {})


def test_sizes_of_a_fleet_are_checked() -> None:
    assert ClusterOptions(replicas=2).autoscaling() is None
    scaled = ClusterOptions(replicas=2, max_replicas=8).autoscaling()
    assert scaled is not None
    assert (scaled.min_replicas, scaled.max_replicas) == (2, 8)
    for name, options in (
        ("max_replicas", {"replicas": 3, "max_replicas": 2}),
        ("min_replicas", {"min_replicas": 1}),
        ("min_replicas", {"min_replicas": 3, "max_replicas": 4}),
        ("replicas", {"replicas": 0}),
        ("router", {"router": "random"}),
        ("replica_memory", {"replica_memory": "much"}),
    ):
        with pytest.raises(InvalidParameter, match=name):
            ClusterOptions(**options)  # type: ignore[arg-type]
