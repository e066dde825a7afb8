"""`chairlift simulate` and `chairlift plan` as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.core.cost_model import StepShape
from chairlift.lab.report.plots import save_panels
from chairlift.lab.simulator.records import SimulationOutcome
from chairlift.lab.simulator.roofline import StepCost


@dataclass(frozen=True, slots=True)
class DecodePoint:
    batch: int
    seconds: float  # of a step in which all requests decode


def decode_curve(cost: StepCost, context: int, largest: int) -> list[DecodePoint]:
    """Decode steps of 1, 2, 4, … `largest` requests with `context` tokens each."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    return [DecodePoint(size, cost.predict(StepShape(size, 0, size * context, 0, size))) for size in sorted(set(sizes))]


def plot_plan(path: Path, title: str, curve: list[DecodePoint], target: float | None, footnote: str) -> None:
    batches = [point.batch for point in curve]

    def throughput(axes: Any) -> None:
        axes.set_title("Output tokens per second")
        axes.plot(batches, [point.batch / point.seconds for point in curve], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("requests in the batch")

    def step(axes: Any) -> None:
        axes.set_title("Milliseconds per token")
        axes.plot(batches, [1e3 * point.seconds for point in curve], marker="o", color="tab:orange")
        if target is not None:
            axes.axhline(1e3 * target, color="grey", linestyle="--", label="target")
            axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests in the batch")
        axes.set_ylim(bottom=0)

    save_panels(path, title, footnote, [throughput, step])


def plot_outcome(path: Path, outcome: SimulationOutcome, footnote: str) -> None:
    records = outcome.records

    def latencies(axes: Any) -> None:
        axes.set_title("How many requests were answered in time")
        for name, values in (
            ("first token", sorted(record.ttft for record in records)),
            ("whole answer", sorted(record.e2e for record in records)),
        ):
            axes.plot(values, [(index + 1) / len(values) for index in range(len(values))], label=name)
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_ylabel("share")
        axes.legend(fontsize=8)

    def open_requests(axes: Any) -> None:
        axes.set_title("Requests in the system")
        changes = sorted([(record.arrival, 1) for record in records] + [(record.end or 0.0, -1) for record in records])
        count, times, counts = 0, [], []
        for moment, change in changes:
            count += change
            times.append(moment)
            counts.append(count)
        axes.step(times, counts, where="post", linewidth=0.8)
        axes.set_xlabel("seconds")

    save_panels(path, "Simulation", footnote, [latencies, open_requests])
