"""The replicas that an ingress knows, and the choice among them. Ray Serve keeps it up to date from another thread."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

import chairlift
from chairlift.cluster.routing.router import OUTPUT_COST, Route, RoutedRequest, Router

if TYPE_CHECKING:
    from yarl import URL


REPLICAS = "replica"  # name of the deployment


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What stays the same while a replica runs."""

    address: str  # The address of its HTTP server.
    key: str  # Its HTTP server accepts this key from ingresses.
    num_tokens: int  # room of its KV cache
    version: str  # Chairlift's version, with a digest of the server's configuration.
    pid: int  # The process of its HTTP server.
    node: str  # Ray's id of its node

    def url(self, path: str, query: str = "") -> URL:
        """Return the URL of a path as it is written in a request. No path can change the host or the port."""
        from yarl import URL

        server = URL(self.address)
        return URL.build(
            scheme=server.scheme, authority=server.raw_authority, path=path, query_string=query, encoded=True
        )


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    is_ready: bool = True  # False while its engine restarts
    running: int = 0  # sequences
    waiting: int = 0
    pending_tokens: int = 0  # tokens still to compute, with `OUTPUT_COST` for generated ones; an estimate
    held_tokens: int = 0  # Tokens in the KV blocks of open requests.
    prompt_tokens: int = 0  # It counts since its start.
    cached_tokens: int = 0  # Prompt tokens that were in the prefix cache.
    output_tokens: int = 0
    wait: float = 0.0  # seconds that requests wait for their first token lately
    tpot: float = 0.0  # seconds per output token lately; 0 if there were none
    requests: int = 0  # finished

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplicaLoad:
        """Read a report; fields of other versions are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def config_version(config: bytes) -> str:
    """Return the version of a process that runs with this configuration."""
    return f"{chairlift.__version__}+{hashlib.sha256(config).hexdigest()[:8]}"


class LoadReader:
    """Computes the load of a server from its metrics, and recent means from the difference to the last reading."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: dict[str, float] = {}
        self._last_first_token = time.monotonic()

    def read(self, exposition: str) -> ReplicaLoad:
        values = metric_sums(exposition)
        last, self._last = self._last, values

        def grown(name: str) -> float:
            return values.get(name, 0.0) - last.get(name, 0.0)

        def total(name: str) -> int:
            return int(values.get(f"chairlift_{name}", 0))

        running, waiting = total("requests_running"), total("requests_waiting")
        finished = total("requests_total")
        begun = max(1, values.get("chairlift_time_to_first_token_seconds_count", 0))
        prompt, output = total("prompt_tokens_total") / begun, total("output_tokens_total") / max(1, finished)
        return ReplicaLoad(
            is_ready=bool(values.get("chairlift_engine_up")),
            running=running,
            waiting=waiting,
            # Half of a running request's output is still to come, on average.
            pending_tokens=round(waiting * (prompt + OUTPUT_COST * output) + running * OUTPUT_COST * output / 2),
            held_tokens=total("kv_blocks_used") * self._block_size,
            prompt_tokens=total("prompt_tokens_total"),
            cached_tokens=total("prompt_tokens_cached_total"),
            output_tokens=total("output_tokens_total"),
            wait=self._wait(grown, waiting),
            tpot=_mean(grown, "chairlift_inter_token_seconds"),
            requests=finished,
        )

    def _wait(self, grown: Any, waiting: int) -> float:
        """The mean time to first token since the last reading; without any, how long there has been none."""
        now = time.monotonic()
        mean = _mean(grown, "chairlift_time_to_first_token_seconds")
        if mean or not waiting:
            self._last_first_token = now
            return mean
        return now - self._last_first_token


def _mean(grown: Any, histogram: str) -> float:
    count = grown(f"{histogram}_count")
    return float(grown(f"{histogram}_sum") / count) if count > 0 else 0.0


def metric_sums(exposition: str) -> dict[str, float]:
    """Return the values of Prometheus' text format, summed over labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


SUSPECT_SECONDS = 5.0  # A failed replica is avoided so long; Ray Serve removes dead ones soon.


@dataclass(slots=True)
class KnownReplica:
    """A replica as an ingress sees it."""

    id: str
    info: ReplicaInfo
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    suspect_until: float = 0.0  # A time of the monotonic clock.

    @property
    def state(self) -> str:
        if self.suspect_until > time.monotonic():
            return "failing"
        return "ready" if self.load.is_ready else "restarting"


class NoReplica(Exception):
    """There is no replica to send a request to."""


class RoutingTable:
    """The replicas of a fleet, as one ingress sees them, and the choice among them."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._router = Router(policy)
        self._replicas: dict[str, KnownReplica] = {}
        self._doubtful: set[str] = set()  # may not be ready; all others are, so that a choice need not look at all
        self._lock = threading.Lock()
        self.reads_prefixes = self._router.policy.reads_prefixes

    def share_replicas(self) -> None:
        """Expect that other ingresses send requests to the same replicas."""
        self._router.loads.draw = random.Random()

    def update(self, seen: Iterable[tuple[str, ReplicaInfo, ReplicaLoad | None]]) -> None:
        """Take the replicas that are running now, with their last reported load."""
        with self._lock:
            current = {replica: (info, load) for replica, info, load in seen}
            for replica in self._replicas.keys() - current.keys():
                del self._replicas[replica]
                self._doubtful.discard(replica)
                self._router.remove(replica)
            for replica, (info, load) in current.items():
                if replica not in self._replicas:
                    self._replicas[replica] = KnownReplica(replica, info)
                    self._router.add(replica, info.num_tokens)
                if load is not None and load != self._replicas[replica].load:
                    self._replicas[replica].load = load
                    if not load.is_ready:
                        self._doubtful.add(replica)
                    self._router.loads.report(replica, load.pending_tokens, load.held_tokens)

    def replicas(self) -> list[KnownReplica]:
        with self._lock:
            return list(self._replicas.values())

    @property
    def is_ready(self) -> bool:
        return any(replica.state == "ready" for replica in self.replicas())

    def describe(self) -> list[dict[str, Any]]:
        """Each replica with its address, state, version and load."""
        found = []
        for replica in self.replicas():
            info = asdict(replica.info)
            del info["key"]
            load = asdict(replica.load) | {"hit_rate": replica.load.hit_rate}
            found.append({"id": replica.id, "state": replica.state, **info, "load": load})
        return found

    def route(self, request: RoutedRequest, avoided: Collection[str] = ()) -> tuple[KnownReplica, Route]:
        """Choose a replica. One that is `avoided`, failing or restarting is only taken if there is no other."""
        with self._lock:
            if not self._replicas:
                raise NoReplica
            self._doubtful = {one for one in self._doubtful if self._replicas[one].state != "ready"}
            bad = self._doubtful | {one for one in avoided if one in self._replicas}
            if len(bad) == len(self._replicas):
                bad = {one for one in avoided if one in self._replicas}
            if len(bad) == len(self._replicas):
                bad = set()
            route = self._router.route(request, bad)
            return self._replicas[str(route.replica)], route

    def started(self, route: Route) -> None:
        with self._lock:
            self._router.started(route)

    def ended(self, route: Route, num_output: int | None = None) -> None:
        with self._lock:
            self._router.ended(route, num_output)

    def failed(self, replica: str) -> None:
        """Avoid a replica that did not answer, until Ray Serve has found out about it."""
        with self._lock:
            if replica in self._replicas:
                self._replicas[replica].suspect_until = time.monotonic() + SUSPECT_SECONDS
                self._doubtful.add(replica)


_tables: dict[str, RoutingTable] = {}  # The tables of this process; the keys are policies.


def routing_table(policy: str) -> RoutingTable:
    """The table of this process, which is empty until Ray Serve has sent the replicas."""
    return _tables.setdefault(policy, RoutingTable(policy))
