"""Prometheus' text format, from the metrics of one or several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MetricSample = tuple[str, dict[str, str], float]  # name, labels, value


def sum_samples(samples: Iterable[MetricSample]) -> list[MetricSample]:
    """Add the values of equal names and labels."""
    return [(name, dict(labels), value) for (name, labels), value in _sums(samples).items()]


def _sums(samples: Iterable[MetricSample]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in samples:
        key = name, tuple(sorted(labels.items()))
        sums[key] = sums.get(key, 0.0) + value
    return sums


def add_samples(families: Sequence[Metric], others: Iterable[MetricSample]) -> None:
    """Add the values of other processes to those of the same name and labels."""
    sums = _sums(others)
    for family in families if sums else ():
        for index, sample in enumerate(family.samples):
            added = sums.pop((sample.name, tuple(sorted(sample.labels.items()))), 0.0)
            if added:
                family.samples[index] = sample._replace(value=sample.value + added)
    by_sample = {f"{family.name}_total": family for family in families if family.type == "counter"}
    for (name, labels), value in sums.items():  # labels that this process has not seen
        if name in by_sample:
            by_sample[name].samples.append(Sample(name, dict(labels), value, None, None, None))


def render(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
