"""Prometheus metrics of one or several processes, from the engine's step reports and from requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from chairlift.core.kv.tiers import TierUsage
from chairlift.core.scheduler.waiting_queue import WaitReason
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.wire.messages import AdapterTotals, Loaded, StepReport

_LATENCIES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
EARLIER_REASONS = {"slots": "seats", "isolation": "courtesy"}  # labels that earlier versions had
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Metrics:
    def __init__(self, model: str = "") -> None:
        """`model` is the label of metrics under vLLM's names; without it they are not shown."""
        self._model = model
        registry = self._registry = CollectorRegistry()
        self.other_samples: Callable[[], Iterable[MetricSample]] = tuple

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"chairlift_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"chairlift_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _LATENCIES) -> Histogram:
            return Histogram(f"chairlift_{name}", text, buckets=buckets, registry=registry)

        self._last_wait_reasons: set[str] = set()  # reasons in the last report
        self.running = gauge("requests_running", "Requests in the batch")
        self.open = gauge("requests_open", "Sequences that the front end has accepted and not yet answered")
        self.waiting = gauge("requests_waiting", "Requests in the engine's queue")
        self.wait_reasons = gauge("requests_waiting_for", "Waiting requests by reason", ("reason",))
        self._set_wait_reasons({reason.label: 0 for reason in WaitReason})
        self.kv_used = gauge("kv_blocks_used", "KV blocks held by requests")
        self.kv_total = gauge("kv_blocks_total", "KV blocks in total")
        self.states_used = gauge("state_slots_used", "State slots of recurrent layers held by requests")
        self.snapshots = gauge("state_snapshots", "State slots that hold snapshots of cached prefixes")
        self.states_total = gauge("state_slots_total", "State slots in total; 0 without recurrent layers")
        self.engine_up = gauge("engine_up", "1 while the engine is ready")
        self.steps = counter("steps", "Steps the engine has run")
        self.step_seconds = counter("step_seconds", "Time the engine spent in steps")
        self.step_tokens = counter("step_tokens", "Tokens computed, by kind", ("kind",))
        self.part_seconds = counter("step_part_seconds", "Time the engine spent in parts of steps", ("part",))
        self.step_requests = histogram("step_requests", "Requests in a step", _SIZES)
        self.prediction_error = histogram(
            "step_prediction_error_ratio", "|measured - predicted| / measured time of a step", _RATIOS
        )
        self.prefill_limit = gauge("step_prefill_limit_tokens", "Prompt tokens that the budget allows in a step")
        self.decisions = counter("budget_decisions", "Changes of the token budget, by reason", ("reason",))
        self.proposed = counter("drafts_proposed", "Draft tokens verified, by position", ("place",))
        self.accepted = counter("drafts_accepted", "Draft tokens accepted, by position", ("place",))
        self.verifications = counter("draft_verifications", "Verifications of one request's draft tokens")
        self.speedup = gauge("speculation_speedup_ratio", "Estimated speed relative to decoding without drafts")
        self.adapters_known = gauge("adapters_registered", "Adapters that requests can name")
        self.adapters_resident = gauge("adapters_in_memory", "Adapters in memory, or being loaded")
        self.adapter_bytes = gauge("adapter_memory_bytes", "Memory that adapters take")
        self.adapter_loads = counter("adapter_loads", "Adapters loaded into memory")
        self.adapter_evictions = counter("adapter_evictions", "Adapters that left memory for others")
        self.adapter_tokens = counter("adapter_tokens", "Tokens generated with an adapter", ("adapter",))
        self.tier_used = gauge("kv_tier_used_bytes", "Bytes of cached blocks in a tier", ("tier",))
        self.tier_total = gauge("kv_tier_total_bytes", "Bytes that a tier may have", ("tier",))
        self.tier_loaded = counter("kv_tier_loaded_bytes", "Bytes loaded from a tier", ("tier",))
        self.tier_saved = counter("kv_tier_saved_bytes", "Bytes copied to a tier", ("tier",))
        self.tier_evictions = counter("kv_tier_evictions", "Parts of blocks that left a tier for others", ("tier",))
        self.tier_lost = counter("kv_tier_lost", "Parts of blocks that were damaged or could not be written", ("tier",))
        self._tiers: dict[str, TierUsage] = {}  # The last report's.
        self._adapters: AdapterTotals | None = None  # The last report's.
        self._adapter_counts: dict[str, int] = {}  # tokens by adapter, as of the last report that had it
        self.preemptions = counter("preemptions", "Requests preempted for lack of memory")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self.lookups = counter("prefix_lookups", "Prefix cache lookups, by result", ("result",))
        self.output_tokens = counter("output_tokens", "Tokens generated")
        self.requests = counter("requests", "Completions, by finish reason", ("reason",))
        self.refused = counter("requests_refused", "Requests refused temporarily, by status", ("status",))
        self.rate_limited = counter("requests_rate_limited", "Requests refused for a key's limit", ("key", "limit"))
        self.targets = counter(
            "request_targets", "Completions with targets, by class, target and result", ("class", "target", "result")
        )
        self.start_seconds = gauge("engine_start_seconds", "Time of the engine's last start, by phase", ("phase",))
        self.restarts = counter("engine_restarts", "Restarts of the engine process")
        self.worker_restarts = counter("worker_restarts", "Restarts of HTTP processes")
        self.recorder_faults = counter("dashboard_faults", "Failures of the dashboard's recorder")
        self.first_token = histogram("time_to_first_token_seconds", "From the request to its first token")
        self.inter_token = histogram("inter_token_seconds", "Between consecutive tokens of a completion")
        self.end_to_end = histogram("end_to_end_seconds", "From the request to its end")
        self.phases = {
            "queue": histogram("request_queue_seconds", "From the request to its admission to the batch"),
            "prefill": histogram("request_prefill_seconds", "From the admission to the first token"),
            "decode": histogram("request_decode_seconds", "From the first to the last token"),
        }
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.request_output_tokens = histogram("request_output_tokens", "Tokens of a finished completion", _TOKENS)

    def record_step(self, report: StepReport) -> None:
        self.running.set(report.running)
        self.waiting.set(report.waiting)
        self._set_wait_reasons(report.wait_reasons)
        for result, count in report.lookups.items():
            self.lookups.labels(result).inc(count)
        self.preemptions.inc(report.preemptions)
        self.kv_used.set(report.used_blocks)
        self.kv_total.set(report.total_blocks)
        if report.states is not None:
            self.states_used.set(report.states.used)
            self.snapshots.set(report.states.snapshots)
            self.states_total.set(report.states.total)
        for tier in report.tiers:
            self._record_tier(tier)
        if report.adapters is not None:
            self._record_adapters(report.adapters)
        if report.requests:
            self.steps.inc()
            self.step_requests.observe(report.requests)
            self.step_seconds.inc(report.seconds)
            for part, seconds in report.part_seconds.items():
                self.part_seconds.labels(part).inc(seconds)
            self.step_tokens.labels("decode").inc(report.decode_tokens)
            self.step_tokens.labels("prefill").inc(report.prefill_tokens)
            if report.predicted_seconds is not None and report.seconds > 0:
                self.prediction_error.observe(abs(report.seconds - report.predicted_seconds) / report.seconds)
        if report.verifications:
            self.verifications.inc(report.verifications)
            counts = zip(report.proposed_at, report.accepted_at, strict=True)
            for position, (proposed, accepted) in enumerate(counts, start=1):
                self.proposed.labels(str(position)).inc(proposed)
                self.accepted.labels(str(position)).inc(accepted)
        if report.speedup is not None:
            self.speedup.set(report.speedup)
        if report.prefill_limit is not None:
            self.prefill_limit.set(report.prefill_limit)
            self.decisions.labels(report.limit_reason).inc()

    def _record_tier(self, tier: TierUsage) -> None:
        before = self._tiers.get(tier.name, TierUsage(tier.name, 0, 0, 0, 0, 0, 0))
        self._tiers[tier.name] = tier
        self.tier_used.labels(tier.name).set(tier.used_bytes)
        self.tier_total.labels(tier.name).set(tier.total_bytes)
        self.tier_loaded.labels(tier.name).inc(tier.loaded_bytes - before.loaded_bytes)
        self.tier_saved.labels(tier.name).inc(tier.saved_bytes - before.saved_bytes)
        self.tier_evictions.labels(tier.name).inc(tier.evictions - before.evictions)
        self.tier_lost.labels(tier.name).inc(tier.lost - before.lost)

    def _record_adapters(self, totals: AdapterTotals) -> None:
        before = self._adapters
        if before is None or totals.loads < before.loads:  # The engine was started again.
            before = AdapterTotals(0, 0, 0, 0, 0, {})
        self._adapters = totals
        self.adapters_known.set(totals.registered)
        self.adapters_resident.set(totals.in_memory)
        self.adapter_bytes.set(totals.num_bytes)
        self.adapter_loads.inc(totals.loads - before.loads)
        self.adapter_evictions.inc(max(0, totals.evictions - before.evictions))
        for name, tokens in totals.tokens.items():
            counted = self._adapter_counts.get(name, 0)
            self._adapter_counts[name] = tokens
            self.adapter_tokens.labels(name).inc(tokens - counted if tokens >= counted else tokens)

    def record_targets(self, service_class: str, met: Mapping[str, bool]) -> None:
        """Count a completion by whether it met each of its targets, and all of them."""
        for target, is_met in {**met, "all": all(met.values())}.items():
            self.targets.labels(service_class, target, "in_time" if is_met else "late").inc()

    @staticmethod
    def value(gauge: Gauge) -> int:
        return int(next(iter(gauge.collect())).samples[0].value)

    def watch_engine(self, engine: EngineClient) -> None:
        """Read the gauges of an engine's state from its client."""
        self.open.set_function(lambda: engine.num_open)
        self.engine_up.set_function(lambda: engine.state is EngineState.READY)
        engine.on_loaded = self.record_loaded

    def record_loaded(self, loaded: Loaded) -> None:
        self.kv_total.set(loaded.total_blocks)
        for phase, seconds in loaded.start_seconds.items():
            self.start_seconds.labels(phase).set(seconds)

    def record_restart(self) -> None:
        """Reset the gauges of an engine that died."""
        self.restarts.inc()
        self._tiers.clear()
        for gauge in (self.running, self.waiting, self.kv_used, self.states_used, self.snapshots):
            gauge.set(0)
        self._set_wait_reasons({})

    def _set_wait_reasons(self, counts: Mapping[str, int]) -> None:
        counts = {**dict.fromkeys(self._last_wait_reasons, 0), **counts}
        for reason, count in counts.items():
            self.wait_reasons.labels(reason).set(count)
            if reason in EARLIER_REASONS:
                self.wait_reasons.labels(EARLIER_REASONS[reason]).set(count)
        self._last_wait_reasons = {reason for reason, count in counts.items() if count}

    def values(self) -> dict[str, float]:
        """Return all metrics as a dict, without zeros and histogram buckets: "requests_total stop" -> 3."""
        found = {}
        for family in self.families():
            for sample in family.samples:
                if sample.value and not sample.name.endswith(("_bucket", "_created")):
                    found[" ".join((sample.name.removeprefix("chairlift_"), *sample.labels.values()))] = sample.value
        return found

    def families(self) -> list[Metric]:
        """Return all metrics, with those of other processes added."""
        families = list(self._registry.collect())
        add_samples(families, self.other_samples())
        return families

    def samples(self) -> list[MetricSample]:
        """Return the counters and histograms of this process alone."""
        return [
            (sample.name, sample.labels, sample.value)
            for family in self._registry.collect()
            if family.type in ("counter", "histogram")
            for sample in family.samples
            if sample.value and not sample.name.endswith("_created")
        ]

    def render(self) -> bytes:
        families = self.families()
        return render([*families, *vllm_aliases(families, self._model)] if self._model else families)

    async def exposition(self) -> bytes:
        """Return the text of /metrics."""
        return self.render()


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


# vLLM's name of each metric, by ours. The kinds are the same, and so are the units.
ALIASES: Mapping[str, str] = {
    "chairlift_requests_running": "vllm:num_requests_running",
    "chairlift_requests_waiting": "vllm:num_requests_waiting",
    "chairlift_preemptions": "vllm:num_preemptions",
    "chairlift_prompt_tokens": "vllm:prompt_tokens",
    "chairlift_output_tokens": "vllm:generation_tokens",
    "chairlift_prompt_tokens_cached": "vllm:prefix_cache_hits",
    "chairlift_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "chairlift_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "chairlift_end_to_end_seconds": "vllm:e2e_request_latency_seconds",
    "chairlift_request_queue_seconds": "vllm:request_queue_time_seconds",
    "chairlift_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "chairlift_request_decode_seconds": "vllm:request_decode_time_seconds",
    "chairlift_request_prompt_tokens": "vllm:request_prompt_tokens",
    "chairlift_request_output_tokens": "vllm:request_generation_tokens",
    "chairlift_draft_verifications": "vllm:spec_decode_num_drafts",
}
# Further names of the same metrics: of older versions, or of what is the same here.
SECOND_ALIASES: Mapping[str, str] = {
    "chairlift_prompt_tokens": "vllm:prefix_cache_queries",
    "chairlift_inter_token_seconds": "vllm:time_per_output_token_seconds",
}
# Sums over our labels.
SUMS: Mapping[str, str] = {
    "chairlift_drafts_proposed": "vllm:spec_decode_num_draft_tokens",
    "chairlift_drafts_accepted": "vllm:spec_decode_num_accepted_tokens",
}
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second is that of older versions
SUCCESS = "vllm:request_success"
FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


def vllm_aliases(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    labels = {"model_name": model, "engine": "0"}
    found = {family.name: family for family in families}
    for aliases in (ALIASES, SECOND_ALIASES):
        for own, alias in aliases.items():
            samples = [(one.name.replace(own, alias, 1), one.labels, one.value) for one in found[own].samples]
            yield _metric(alias, found[own], samples, labels)
    for own, alias in SUMS.items():
        total = sum(one.value for one in found[own].samples if one.name == f"{own}_total")
        yield _metric(alias, found[own], [(f"{alias}_total", {}, total)], labels)
    used, total = (found[f"chairlift_kv_blocks_{name}"].samples[0].value for name in ("used", "total"))
    for alias in USAGE:
        metric = Metric(alias, "Share of the KV blocks that requests hold, from 0 to 1", "gauge")
        metric.samples.append(_sample(alias, labels, used / total if total else 0.0))
        yield metric
    finished = [
        (f"{SUCCESS}_total", {"finished_reason": FINISH_REASONS[one.labels["reason"]]}, one.value)
        for one in found["chairlift_requests"].samples
        if one.name.endswith("_total") and one.labels["reason"] in FINISH_REASONS
    ]
    yield _metric(SUCCESS, found["chairlift_requests"], finished, labels)


def _metric(
    alias: str, own: Metric, samples: Sequence[tuple[str, Mapping[str, str], float]], labels: Mapping[str, str]
) -> Metric:
    metric = Metric(alias, own.documentation, own.type)
    metric.samples += [
        _sample(name, {**labels, **further}, value) for name, further, value in samples if not name.endswith("_created")
    ]
    return metric


def _sample(name: str, labels: Mapping[str, str], value: float) -> Sample:
    return Sample(name, dict(labels), value, None, None, None)
