"""A comparison at several concurrencies, several times, with other engines beside our own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from chairlift.lab.bench.throughput.run import Comparison, Watch
from chairlift.lab.common.measure import add_speedups
from chairlift.lab.common.workload import Workload
from chairlift.lab.peers.peers import Peer
from chairlift.lab.peers.process import PeerFailed

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """What came out at one concurrency."""

    concurrency: int
    rows: list[Row]
    skipped: dict[str, str]  # by the name of a peer: why it has no row


@dataclass(frozen=True)
class Rounds:
    """In every round each engine has its turn, so that a machine that slows down is slow for all of them."""

    own: Comparison
    peers: Sequence[Peer] = ()
    concurrencies: Sequence[int | None] = (None,)  # None: as many seats as the engine chooses
    repeat: int = 1

    @cached_property
    def versions(self) -> dict[str, str | PeerFailed]:
        """Of each peer; or what it lacks."""
        return {peer.name: self._version(peer) for peer in self.peers}

    def run(self, workload: Workload, watch: Watch) -> Iterator[Table]:
        for concurrency in self.concurrencies:
            yield self._at(concurrency, workload, watch)

    def _at(self, concurrency: int | None, workload: Workload, watch: Watch) -> Table:
        own = self.own if concurrency is None else self._with_seats(concurrency)
        seats = own.seats()
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
                        row = peer.measure(workload, seats, advance).row(peer.name)
                    runs.setdefault(peer.name, []).append(row)
                except PeerFailed as failure:
                    skipped[peer.name] = str(failure)
        rows = [median_row(of_one) for name, of_one in runs.items() if name not in skipped]
        self._compare(rows, seats)
        return Table(seats, rows, skipped)

    def _with_seats(self, concurrency: int) -> Comparison:
        return replace(self.own, options=dict(self.own.options) | {"max_batch_requests": concurrency})

    def _compare(self, rows: list[Row], seats: int) -> None:
        add_speedups(rows)
        names = {peer.name for peer in self.peers}
        best = max((row["output_tokens_per_s"] for row in rows if row["name"] in names), default=None)
        for row in rows:
            row["concurrency"] = seats
            row["vs_best_peer"] = row["output_tokens_per_s"] / best if best else None

    @staticmethod
    def _version(peer: Peer) -> str | PeerFailed:
        try:
            return peer.version()
        except PeerFailed as failure:
            return failure


def median_row(rows: Sequence[Row]) -> Row:
    """Each figure's median over several runs of the same engine; what an engine does not tell stays None."""
    told = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    middle = {name: median(row[name] for row in rows) for name in told}
    return rows[0] | middle | {"output_tokens_per_s_runs": [row["output_tokens_per_s"] for row in rows]}
