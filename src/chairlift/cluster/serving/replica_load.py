"""What a replica reports about itself: its identity once, its load every second."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

import chairlift
from chairlift.cluster.routing.router import OUTPUT_COST

if TYPE_CHECKING:
    from yarl import URL

REPLICAS = "replica"  # name of the deployment


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What stays the same while a replica runs."""

    address: str  # of its HTTP server
    key: str  # that its HTTP server accepts from ingresses
    num_tokens: int  # room of its KV cache
    version: str  # of Chairlift, with a digest of the server's configuration
    pid: int  # of its HTTP server
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
    held_tokens: int = 0  # in the KV blocks of open requests
    prompt_tokens: int = 0  # since its start
    cached_tokens: int = 0  # of them found in the prefix cache
    output_tokens: int = 0
    wait: float = 0.0  # seconds that requests wait for their first token lately
    tpot: float = 0.0  # seconds per output token lately; 0 if there were none
    requests: int = 0  # finished

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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
