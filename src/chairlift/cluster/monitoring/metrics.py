"""The metrics of a fleet: the series of all replicas, each with the label `replica`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from chairlift.cluster.serving.fleet import FleetView
from chairlift.cluster.serving.routing_table import KnownReplica
from chairlift.server.metrics import Metrics

log = logging.getLogger("chairlift.cluster")

SECONDS = 2.0  # for a replica's answer; Prometheus waits for 10
AT_ONCE = 64
MAX_BYTES = 4 * 2**20  # of one replica


async def fleet_exposition(fleet: FleetView, own: Metrics | None = None) -> bytes:
    """Return the fleet in Prometheus' text format. A replica that does not answer in time has only `…_replica_up` 0.

    `own` are the metrics of the ingress, which refuses requests before any replica sees them.
    """
    replicas, free = fleet.replicas(), asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        texts = await asyncio.gather(*(_read(session, free, replica) for replica in replicas))
    answers = list(zip(replicas, texts, strict=True))
    texts_by_name = [(replica.id, text) for replica, text in answers if text is not None]
    if own is not None:
        texts_by_name.append(("ingress", _refusals(own)))
    series = merge_expositions(texts_by_name)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fleet(answers))
    return generate_latest(registry) + series


def _refusals(own: Metrics) -> bytes:
    """Return the metrics of an ingress; all others describe an engine."""
    registry = CollectorRegistry(auto_describe=False)
    for counter in (own.refused, own.rate_limited):
        registry.register(counter)
    return generate_latest(registry)


async def _read(session: aiohttp.ClientSession, free: asyncio.Semaphore, replica: KnownReplica) -> bytes | None:
    """Return the text of a replica's /metrics; None if it does not answer."""
    async with free:
        try:
            async with session.get(replica.info.url("/metrics"), headers={"x-api-key": replica.info.key}) as found:
                text = await found.content.read(MAX_BYTES + 1)
                while len(text) <= MAX_BYTES and (more := await found.content.read(MAX_BYTES + 1)):
                    text += more
                if found.status == 200 and len(text) <= MAX_BYTES:
                    return text
                problem = f"status {found.status}, {len(text)} bytes"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = type(error).__name__
    log.warning("the metrics of the replica %s cannot be read (%s)", replica.id, problem)
    return None


class _Fleet(Collector):
    def __init__(self, answers: list[tuple[KnownReplica, bytes | None]]) -> None:
        self._answers = answers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        up = GaugeMetricFamily(
            "chairlift_fleet_replica_up", "Whether a replica's metrics could be read.", labels=["replica"]
        )
        states = GaugeMetricFamily("chairlift_fleet_replicas", "Replicas by state.", labels=["state"])
        counts = dict.fromkeys(("ready", "restarting", "failing"), 0)
        for replica, text in self._answers:
            up.add_metric([replica.id], float(text is not None))
            counts[replica.state] += 1
        for state, count in counts.items():
            states.add_metric([state], count)
        return up, states


def merge_expositions(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """Join texts of Prometheus' format, with the label `replica` for each line; lines of a metric stay together."""
    heads: dict[bytes, list[bytes]] = {}  # HELP and TYPE by the metric's name
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in expositions:
        label = b'replica="%b"' % replica.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n").encode()
        name, is_first = b"", False
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_first = name not in heads
                heads.setdefault(name, [])
                samples.setdefault(name, [])
            if line.startswith(b"#"):
                if is_first:
                    heads[name].append(line)
            elif line and name:  # other texts must not fail the page
                samples[name].append(_labelled(line, label))
    return b"".join(line + b"\n" for name, head in heads.items() for line in (*head, *samples[name]))


def _labelled(line: bytes, label: bytes) -> bytes:
    name, brace, rest = line.partition(b"{")
    if brace and b" " not in name:
        return b"%b{%b,%b" % (name, label, rest)
    name, _, value = line.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)
