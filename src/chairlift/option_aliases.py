"""Options of `LLM` under the names that users of other engines know.

Each of them means something here, or is refused with the reason: nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.errors import InvalidParameter

OPTIONS = (
    "device",
    "dtype",
    "quantization",
    "kv_dtype",
    "max_model_len",
    "max_batch_tokens",
    "max_prefill_tokens",
    "max_batch_requests",
    "budget",
    "target_tpot_ms",
    "target_ttft_ms",
    "block_size",
    "kv_memory",
    "memory_share",
    "prefix_caching",
    "policy",
    "max_delay_ms",
    "order",
    "tenant_weights",
    "preemption",
    "swap_memory",
    "max_overtakes",
    "speculate",
    "draft_length",
    "attention",
    "batch_invariant",
    "cuda_graphs",
    "load_format",
    "seed",
)

SAME_THING = {
    "max_num_seqs": "max_batch_requests",
    "max_batch_size": "max_batch_requests",
    "scheduling_policy": "order",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_memory",
    "gpu_memory_utilization": "memory_share",
    "num_speculative_tokens": "draft_length",
    "kv_cache_dtype": "kv_dtype",
}

OPPOSITE = {"enforce_eager": "cuda_graphs"}

# What these ask for with the values listed is always so; any other value is refused with the reason.
ALWAYS_SO: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code that comes with a model is never run"),
    "tensor_parallel_size": ((1,), "one device per engine"),
    "pipeline_parallel_size": ((1,), "one device per engine"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked to the step's budget"),
    "tokenizer_mode": (("auto",), "the tokenizer is the model's own"),
}


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as `EngineConfig` calls them."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in ALWAYS_SO:
            allowed, reason = ALWAYS_SO[name]
            if value not in allowed:
                raise InvalidParameter(name, f"{value!r} is not supported: {reason}")
            continue
        if name in OPPOSITE:
            if not isinstance(value, bool):
                raise InvalidParameter(name, f"must be true or false, got {value!r}")
            name, value = OPPOSITE[name], not value
        own = SAME_THING.get(name, name)
        if own not in OPTIONS:
            raise InvalidParameter(name, f"is not an option; choose from {', '.join(OPTIONS)}")
        if own in translated:
            raise InvalidParameter(name, f"{own} is given twice")
        translated[own] = value
    if "dtype" in translated:
        translated["dtype"] = str(translated["dtype"]).removeprefix("torch.")
    return translated
