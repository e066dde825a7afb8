"""The pictures of `chairlift simulate` and `chairlift plan`, and the curve of decode steps by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from chairlift.core.cost_model import StepShape
from chairlift_lab.report.plots import save_panels
from chairlift_lab.simulator.records import RequestRecord, SimulationOutcome
from chairlift_lab.simulator.roofline import StepCost


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size of the curve."""

    batch: int  # requests, each of which decodes one token
    seconds: float  # the duration of the step

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def decode_curve(cost: StepCost, context: int, largest: int) -> list[DecodePoint]:
    """Decode steps of 1, 2, 4, … `largest` requests with `context` tokens each."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    return [DecodePoint(size, cost.predict(_decode_step(size, context))) for size in sizes]


def _decode_step(batch: int, context: int) -> StepShape:
    return StepShape(decode_tokens=batch, decode_kv=batch * context, requests=batch)


def plot_plan(path: Path, title: str, curve: Sequence[DecodePoint], target: float | None, footnote: str) -> None:
    """Throughput and time per token by batch size; `target` is in seconds per token."""
    batches = [point.batch for point in curve]

    def throughput(axes: Any) -> None:
        axes.set_title("Output tokens per second")
        axes.plot(batches, [point.tokens_per_second for point in curve], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests in the batch")

    def time_per_token(axes: Any) -> None:
        axes.set_title("Milliseconds per token")
        axes.plot(batches, [1e3 * point.seconds for point in curve], marker="o", color="tab:orange")
        if target is not None:
            axes.axhline(1e3 * target, color="grey", linestyle="--", label="target")
            axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests in the batch")
        axes.set_ylim(bottom=0)

    save_panels(path, title, footnote, [throughput, time_per_token])


def plot_outcome(path: Path, outcome: SimulationOutcome, footnote: str) -> None:
    """The distribution of latencies, and the number of unfinished requests over time."""
    records = outcome.records

    def latencies(axes: Any) -> None:
        axes.set_title("Share of requests within a latency")
        for name, values in (
            ("first token", sorted(record.ttft for record in records)),
            ("end to end", sorted(record.e2e for record in records)),
        ):
            axes.plot(values, [(index + 1) / len(values) for index in range(len(values))], label=name)
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_ylabel("share")
        axes.legend(fontsize=8)

    def unfinished(axes: Any) -> None:
        axes.set_title("Unfinished requests")
        axes.step(*unfinished_requests(records), where="post", linewidth=0.8)
        axes.set_xlabel("seconds")

    save_panels(path, "Simulation", footnote, [latencies, unfinished])


def unfinished_requests(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """The times at which a request arrives or ends, and how many are unfinished from then on."""
    changes = [(record.arrival, 1) for record in records] + [(record.arrival + record.e2e, -1) for record in records]
    changes.sort()
    return [time for time, _ in changes], list(accumulate(change for _, change in changes))
