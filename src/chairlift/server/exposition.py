"""Prometheus' text format, from the metrics of one or several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MetricSample = tuple[str, dict[str, str], float]  # name, labels, value


def add_samples(families: Sequence[Metric], others: Iterable[MetricSample]) -> None:
    """Add the values of other processes to those of the same name and labels."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in others:
        key = name, tuple(sorted(labels.items()))
        sums[key] = sums.get(key, 0.0) + value
    if not sums:
        return
    for family in families:
        for index, sample in enumerate(family.samples):
            added = sums.pop((sample.name, tuple(sorted(sample.labels.items()))), 0.0)
            if added:
                family.samples[index] = sample._replace(value=sample.value + added)
    by_sample = {f"{family.name}_total": family for family in families if family.type == "counter"}
    for (name, labels_found), value in sums.items():  # labels that this process has not seen
        if name in by_sample:
            by_sample[name].samples.append(Sample(name, dict(labels_found), value, None, None, None))


def render(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
