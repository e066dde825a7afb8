"""Metrics under vLLM's names, derived from our own, so that dashboards and autoscalers made for vLLM work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.samples import Sample

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
    yield from _usage(found, labels)
    finished = [
        (f"{SUCCESS}_total", {"finished_reason": FINISH_REASONS[one.labels["reason"]]}, one.value)
        for one in found["chairlift_requests"].samples
        if one.name.endswith("_total") and one.labels["reason"] in FINISH_REASONS
    ]
    yield _metric(SUCCESS, found["chairlift_requests"], finished, labels)


def _usage(found: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    used, total = (found[f"chairlift_kv_blocks_{name}"].samples[0].value for name in ("used", "total"))
    for alias in USAGE:
        metric = Metric(alias, "Share of the KV blocks that requests hold, from 0 to 1", "gauge")
        metric.samples.append(_sample(alias, labels, used / total if total else 0.0))
        yield metric


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
