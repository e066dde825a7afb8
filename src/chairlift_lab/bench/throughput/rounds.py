"""Repeated comparisons at several concurrencies, with peers beside our own engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from chairlift_lab.bench.throughput.run import ThroughputComparison, Watch
from chairlift_lab.common.measure import add_speedups
from chairlift_lab.common.workload import Workload
from chairlift_lab.peers.peers import Peer
from chairlift_lab.peers.process import PeerFailed

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConcurrencyResult:
    """The rows of one concurrency, and why peers have none."""

    concurrency: int
    rows: list[Row]
    skipped: dict[str, str]  # by the name of the peer


@dataclass(frozen=True)
class Rounds:
    """Every round runs each engine once, so that a slow phase of the machine affects all of them."""

    own: ThroughputComparison
    peers: Sequence[Peer] = ()
    concurrencies: Sequence[int | None] = (None,)  # None: the engine's default
    repeat: int = 1

    @cached_property
    def versions(self) -> dict[str, str | PeerFailed]:
        """The version of each peer, or why it cannot run."""
        return {peer.name: self._version(peer) for peer in self.peers}

    def run(self, workload: Workload, watch: Watch) -> Iterator[ConcurrencyResult]:
        for concurrency in self.concurrencies:
            yield self._at(concurrency, workload, watch)

    def _at(self, concurrency: int | None, workload: Workload, watch: Watch) -> ConcurrencyResult:
        own = self.own if concurrency is None else self._with_concurrency(concurrency)
        slots = own.slots()
        runs: dict[str, list[Row]] = {}
        skipped = {name: str(found) for name, found in self.versions.items() if isinstance(found, PeerFailed)}
        for _ in range(self.repeat):
            for row in own.run(workload, watch):
                runs.setdefault(row["name"], []).append(row)
            for peer in self.peers:
                if peer.name in skipped:
                    continue
                try:
                    with watch(peer.name) as advance:
                        row = peer.measure(workload, slots, advance).row(peer.name)
                    runs.setdefault(peer.name, []).append(row)
                except PeerFailed as failure:
                    skipped[peer.name] = str(failure)
        rows = [median_row(of_one) for name, of_one in runs.items() if name not in skipped]
        self._compare(rows, slots)
        return ConcurrencyResult(slots, rows, skipped)

    def _with_concurrency(self, concurrency: int) -> ThroughputComparison:
        return replace(self.own, options=dict(self.own.options) | {"max_batch_requests": concurrency})

    def _compare(self, rows: list[Row], slots: int) -> None:
        add_speedups(rows)
        names = {peer.name for peer in self.peers}
        best = max((row["output_tokens_per_s"] for row in rows if row["name"] in names), default=None)
        for row in rows:
            row["concurrency"] = slots
            row["vs_best_peer"] = row["output_tokens_per_s"] / best if best else None

    @staticmethod
    def _version(peer: Peer) -> str | PeerFailed:
        try:
            return peer.version()
        except PeerFailed as failure:
            return failure


def median_row(rows: Sequence[Row]) -> Row:
    """The median of each figure over several runs of one engine; figures that an engine does not have stay None."""
    numeric = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    middle = {name: median(row[name] for row in rows) for name in numeric}
    return rows[0] | middle | {"output_tokens_per_s_runs": [row["output_tokens_per_s"] for row in rows]}
