"""The keywords of `LLM` and `AsyncLLM`, for editors and type checkers.

This module is generated from the declarations in `chairlift/config.py` (`make options-page`); do not edit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch


class EngineKeywords(TypedDict, total=False):
    """The options of `EngineConfig`, each with the names that vLLM has for it."""

    load_format: str
    """How weights are read; dummy creates random weights from config.json. Default: `auto`."""
    model_impl: str
    """What runs the model: native code, that of transformers, or native where the family has it (auto). Default:
    `auto`."""
    max_model_len: int | None
    """Maximum number of tokens of a prompt plus its output. Default: the model's limit."""
    weight_cache: str | None
    """Folder for packed weights of CPUs, which later starts map instead of packing them again; off: none. Default:
    weights, in the folder for fetched models."""
    generation_config: str
    """Sampling parameters of requests that leave them out: what the model recommends (auto), none, or those in a
    generation_config.json, named by its path or folder. Default: `auto`."""
    override_generation_config: Mapping[str, Any] | str | None
    """Sampling parameters of requests that leave them out, instead of those of --generation-config: JSON, or such as
    temperature=0.5,top_p=0.9. Default: none."""
    system_prompt: str | None
    """System prompt of conversations without one. Default: that of the chat template, if any."""
    chat_template: str | Path | None
    """Jinja file that replaces the model's chat template. Default: the model's own."""
    presets: Mapping[str, Any] | str | None
    """Sampling parameters and system prompts under names that requests ask for, as `preset` or `MODEL:NAME`: a YAML or
    TOML file of them, or JSON; in a config file a mapping. Default: none."""
    reasoning_parser: str | None
    """Format of the model's reasoning; none keeps it in the content. Default: from its chat template."""
    device: str
    """Device to run on; auto uses a GPU if there is one. Default: `auto`."""
    dtype: str | torch.dtype
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU. With bfloat16 on CPUs that have
    AVX512-BF16, weights and what they are multiplied with are bfloat16, all else is float32. Default: `auto`."""
    quantization: str | None
    """Format of the weights: int8, int4 or bfloat16 on a CPU, fp8 or int4 on a GPU. auto keeps the format of a
    quantized checkpoint on a GPU, and of a large GGUF file on a CPU; otherwise it uses int8 on a CPU where it is
    faster, unless a dtype is given. Default: `auto`."""
    quantize_head: bool
    """Store the language-model head in the format of --quantization, too, or in fp8 beside the weights of a quantized
    checkpoint; int8 does so always. Default: off."""
    kv_dtype: str
    """Type of the KV cache; int8 needs a CPU, fp8 a GPU. Default: `auto`."""
    kv_cache_dtype: str
    """vLLM's name for `kv_dtype`."""
    attention: str
    """Attention backend; auto uses the fastest one that supports the model. Default: `auto`."""
    cuda_graphs: bool
    """On a GPU, capture steps as CUDA graphs and replay them. Default: on."""
    enforce_eager: bool
    """vLLM's name for the opposite of `cuda_graphs`."""
    threads: int | None
    """Threads that compute on a CPU. Default: one per physical core that the process may use."""
    batch_invariant: bool
    """Make a request's tokens independent of the rest of the batch, bit for bit; slower. Default: off."""
    max_batch_tokens: int | None
    """Maximum number of tokens per step, over all requests. Default: from the machine."""
    max_num_batched_tokens: int | None
    """vLLM's name for `max_batch_tokens`."""
    max_prefill_tokens: int | None
    """Maximum number of prompt tokens per step. Default: as --max-batch-tokens."""
    max_batch_requests: int | None
    """Maximum number of requests per step. Default: from the machine."""
    max_num_seqs: int | None
    """vLLM's name for `max_batch_requests`."""
    max_batch_size: int | None
    """vLLM's name for `max_batch_requests`."""
    budget: str | None
    """How much of --max-batch-tokens a step uses: all of it (fixed), so much that prompts are nearly as fast and
    requests that decode are not held up for long (knee), what the latency targets leave (latency), or what the targets
    of requests leave (slack). Default: latency if there is a target, slack with --order slack, else knee; fixed with
    LLM."""
    target_tpot_ms: float | None
    """Target time per output token of running requests. Default: none."""
    target_ttft_ms: float | None
    """Target time to the first token of new requests. Default: none."""
    policy: str
    """When requests are admitted: at every step (continuous), or in batches that run to the end (static, dynamic).
    Default: `continuous`."""
    max_delay_ms: float | None
    """How long a static or dynamic batch waits to be filled. Default: dynamic 50, static 10000."""
    order: str
    """Which waiting request is admitted first: first come first served (fcfs), by priority, least work (shortest),
    short prompts sooner but none much later (boost), most cached tokens (cached), fair between tenants, also with the
    longest cached prefix first (fair, fair-cached), or by the targets of requests: the one due first (edf), the one
    that must begin first (slack). Default: `fcfs`."""
    scheduling_policy: str
    """vLLM's name for `order`."""
    tenant_weights: Mapping[str, float] | Sequence[str] | None
    """A tenant's share with --order fair or fair-cached, such as alice=2; may be repeated. Default: 1 each."""
    boost_seconds: float | None
    """With --order boost, how much sooner a prompt comes that is a third (1/e) as long. Default: 10."""
    priority_takes_slots: bool
    """With --order priority, a request that finds no slot or memory takes that of a running one whose number is higher.
    Default: off."""
    learn_lengths: bool
    """Learn how long the outputs of each tenant are. A request is then admitted only if memory is expected to last
    until the running ones end, and --order shortest goes by it. Default: off."""
    max_overtakes: int | None
    """How often a waiting request may be passed over before it must be admitted next. Default: 16, or 512 with --order
    slack or edf."""
    preemption: str
    """What happens to a request's KV blocks when memory runs out: recompute them later, swap them to host memory, or
    auto (whichever is measured to be cheaper). Default: `recompute`."""
    images: str
    """Whether a model that can reads images: auto reads them where all that it takes is there, off leaves the memory of
    its vision part free. Default: `auto`."""
    image_memory: int | str
    """Memory for what was encoded of images, which requests share. Default: `256MiB`."""
    swap_memory: int | str | None
    """Host memory for swapped blocks, such as 4GiB. Default: as much as the KV cache."""
    block_size: int
    """Tokens per block of the KV cache. Default: `16`."""
    kv_memory: int | str | None
    """Memory for the KV cache and the states of recurrent layers, such as 2GiB. Default: a share of the free memory."""
    kv_cache_memory_bytes: int | str | None
    """vLLM's name for `kv_memory`."""
    state_memory: int | str | None
    """Part of that memory for the states of recurrent layers: of running requests, draft tokens and snapshots of
    prefixes. Default: as many as there is a use for, up to half."""
    memory_share: float | None
    """Share of the memory free after loading that the KV cache gets, instead of --kv-memory. Default: 0.25 on a CPU,
    0.9 on a GPU."""
    gpu_memory_utilization: float | None
    """vLLM's name for `memory_share`."""
    prefix_caching: bool
    """Reuse the cached KV blocks of earlier prompts with the same prefix. Default: on."""
    enable_prefix_caching: bool
    """vLLM's name for `prefix_caching`."""
    kv_host_memory: int | str | None
    """Host memory that keeps cached blocks which the device has no room for, such as 8GiB. Default: none."""
    kv_disk: str | Path | None
    """Folder that keeps cached blocks on disk, also for later starts. Only this user can read it; it contains what
    prompts and outputs can be guessed from. Default: none."""
    kv_disk_size: int | str | None
    """How large that folder may get. Default: 50GiB."""
    kv_events: str | None
    """Publish which blocks are cached at this address, such as tcp://*:5557, for gateways that route by it (vLLM's KV
    events over ZeroMQ). Who can reach it can read the prompts. Default: no."""
    kv_events_replay: str | None
    """Address at which subscribers ask for messages that they missed, such as tcp://*:5558. Default: none."""
    kv_events_topic: str
    """Topic of these messages, such as kv@POD@MODEL for llm-d. Default: empty."""
    speculate: str | None
    """Draft the next tokens and verify several in one step: from the text so far (ngram), with the model's first N
    layers (layers), or with a draft model (draft; see train-draft). The output does not change. Default: no."""
    draft_length: int | None
    """Draft tokens per request and step. Default: from the measured speedup."""
    num_speculative_tokens: int | None
    """vLLM's name for `draft_length`."""
    draft_graphs: bool
    """On a GPU, capture the passes of a draft model or head as CUDA graphs, and draft by one replay. Default: off."""
    lora: Mapping[str, Any] | Sequence[str] | None
    """A LoRA adapter that requests may name: a folder of PEFT or a GGUF file; may be repeated. Default: none."""
    max_loras: int | None
    """Adapters in memory at the same time; others are loaded when they are needed. Alone it leaves room for adapters
    that are added later. Default: 64 if there are any."""
    lora_memory: int | str | None
    """Memory for adapters, such as 1GiB. Default: a sixteenth of the free memory."""
    seed: int | None
    """Seed for requests that have none. Default: random."""
    trust_remote_code: bool
    """vLLM's option, which is always False here: code that comes with a model is never run."""
    tensor_parallel_size: int
    """vLLM's option, which is always 1 here: one device per engine."""
    pipeline_parallel_size: int
    """vLLM's option, which is always 1 here: one device per engine."""
    enable_chunked_prefill: bool | None
    """vLLM's option, which is always True here: prompts are always chunked to the step's budget."""
    tokenizer_mode: str
    """vLLM's option, which is always 'auto' here: the tokenizer is the model's own."""
