"""The engine's options: declared here once, and checked before anything is loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chairlift.attention.backends import BACKENDS
from chairlift.core.budgets.base import BUDGETS, check_budget
from chairlift.core.kv.swap import MODES, check_mode
from chairlift.core.orderings.base import ORDERINGS, Ordering, make_ordering
from chairlift.core.orderings.fair import parse_weights
from chairlift.core.policies.base import POLICIES, Policy, make_policy
from chairlift.errors import InvalidParameter
from chairlift.layers.formats import FORMATS
from chairlift.loading.recommended_sampling import check_source
from chairlift.loading.request_defaults import parse_overrides, parse_presets, read_chat_template
from chairlift.options import above, at_least, check_options, option, parse_bytes, strictly_between
from chairlift.speculation.proposers.base import check_speculate, proposer_factory, speculate_forms
from chairlift.text.reasoning_formats.base import NO_REASONING, REASONING_FORMATS

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
MAX_LORAS = 64  # adapters in memory, by default: as many as requests run on a CPU
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")

model_option = partial(option, group="Model")
device_option = partial(option, group="Device and precision")
batching_option = partial(option, group="Batching")
scheduling_option = partial(option, group="Scheduling")
cache_option = partial(option, group="KV cache")
speculation_option = partial(option, group="Speculative decoding")
adapter_option = partial(option, group="Adapters")


def _check_address(parameter: str, value: str) -> None:
    if not re.fullmatch(r"tcp://.+:\d{1,5}|ipc://.+", value):
        raise InvalidParameter(parameter, f"must look like tcp://*:5557 or ipc:///path, got {value!r}")


def _check_device(parameter: str, value: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise InvalidParameter(parameter, f"unknown device {value!r:.100}; choose auto, cpu, cuda or cuda:N")


def _check_overrides(parameter: str, value: Mapping[str, Any] | str) -> None:
    parse_overrides(parameter, value)


def _check_presets(parameter: str, value: Mapping[str, Any] | str) -> None:
    parse_presets(parameter, value)


def _check_template(parameter: str, value: str | Path) -> None:
    read_chat_template(value, parameter)


def _check_weights(parameter: str, value: Mapping[str, float] | Sequence[str]) -> None:
    parse_weights(value)


def parse_adapters(value: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """The paths of adapters by name, from a mapping or from texts such as "name=path"."""
    if isinstance(value, str) or not isinstance(value, (Mapping, Sequence)):
        raise InvalidParameter("lora", f"must be a mapping of names to paths, got {value!r:.100}")
    if not isinstance(value, Mapping):
        pairs = [str(each).partition("=")[::2] for each in value]
        if repeated := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise InvalidParameter("lora", f"{repeated[0]!r:.100} is given more than once")
        value = dict(pairs)
    for name, path in value.items():
        if not isinstance(name, str) or not isinstance(path, (str, Path)) or not name.strip() or not str(path):
            raise InvalidParameter("lora", f"must be NAME=PATH, got {name!r:.100} and {path!r:.100}")
    return {name: str(path) for name, path in value.items()}


def _check_adapters(parameter: str, value: Mapping[str, Any] | Sequence[str]) -> None:
    parse_adapters(value)


def _check_speculate(parameter: str, value: str) -> None:
    proposer_factory(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. None means that the value is chosen from the model and the machine."""

    load_format: str = model_option(
        "auto", help="How weights are read; dummy creates random weights from config.json.", choices=LOAD_FORMATS
    )
    model_impl: str = model_option(
        "auto",
        help="What runs the model: native code, that of transformers, or native where the family has it (auto).",
        choices=MODEL_IMPLS,
    )
    max_model_len: int | None = model_option(
        None,
        common=True,
        help="Maximum number of tokens of a prompt plus its output.",
        check=at_least(1),
        default_text="the model's limit",
    )
    weight_cache: str | None = model_option(
        None,
        help="Folder for packed weights of CPUs, which later starts map instead of packing them again; off: none.",
        metavar="FOLDER",
        default_text="weights, in the folder for fetched models",
    )
    generation_config: str = model_option(
        "auto",
        help="Sampling parameters of requests that leave them out: what the model recommends (auto), none, or those in "
        "a generation_config.json, named by its path or folder.",
        check=check_source,
        metavar="[auto|none|FILE]",
    )
    override_generation_config: Mapping[str, Any] | str | None = model_option(
        None,
        help="Sampling parameters of requests that leave them out, instead of those of --generation-config: JSON, or "
        "such as temperature=0.5,top_p=0.9.",
        check=_check_overrides,
        metavar="NAME=VALUE[,NAME=VALUE…]",
        default_text="none",
    )
    system_prompt: str | None = model_option(
        None, help="System prompt of conversations without one.", default_text="that of the chat template, if any"
    )
    chat_template: str | Path | None = model_option(  # noqa: RUF009 (options are declared by calls)
        None,
        help="Jinja file that replaces the model's chat template.",
        check=_check_template,
        metavar="FILE",
        default_text="the model's own",
    )
    presets: Mapping[str, Any] | str | None = model_option(
        None,
        help="Sampling parameters and system prompts under names that requests ask for, as `preset` or `MODEL:NAME`: "
        "a YAML or TOML file of them, or JSON; in a config file a mapping.",
        check=_check_presets,
        metavar="FILE",
        default_text="none",
    )
    reasoning_parser: str | None = model_option(
        None,
        help="Format of the model's reasoning; none keeps it in the content.",
        choices=lambda: (NO_REASONING, *REASONING_FORMATS.names()),
        default_text="from its chat template",
    )
    device: str = device_option(
        "auto",
        common=True,
        help="Device to run on; auto uses a GPU if there is one.",
        check=_check_device,
        metavar="[auto|cpu|cuda|cuda:N]",
    )
    dtype: str = device_option(
        "auto",
        help="Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU. With bfloat16 on "
        "CPUs that have AVX512-BF16, weights and what they are multiplied with are bfloat16, all else is float32.",
        choices=("auto", *DTYPES),
    )
    quantization: str | None = device_option(
        "auto",
        common=True,
        help="Format of the weights: int8, int4 or bfloat16 on a CPU, fp8 or int4 on a GPU. auto keeps the format of a "
        "quantized checkpoint on a GPU, and of a large GGUF file on a CPU; otherwise it uses int8 on a CPU where it is "
        "faster, unless a dtype is given.",
        choices=lambda: ("auto", *FORMATS.names()),
    )
    quantize_head: bool = device_option(
        False,
        help="Store the language-model head in the format of --quantization, too, or in fp8 beside the weights of a "
        "quantized checkpoint; int8 does so always.",
    )
    kv_dtype: str = device_option(
        "auto",
        help="Type of the KV cache; int8 needs a CPU, fp8 a GPU.",
        choices=("auto", *KV_DTYPES),
        aliases=("kv_cache_dtype",),
    )
    attention: str = device_option(
        "auto",
        help="Attention backend; auto uses the fastest one that supports the model.",
        choices=lambda: ("auto", *BACKENDS.names()),
    )
    cuda_graphs: bool = device_option(
        True, help="On a GPU, capture steps as CUDA graphs and replay them.", opposite_aliases=("enforce_eager",)
    )
    threads: int | None = device_option(
        None,
        help="Threads that compute on a CPU.",
        check=at_least(1),
        default_text="one per physical core that the process may use",
    )
    batch_invariant: bool = device_option(
        False, help="Make a request's tokens independent of the rest of the batch, bit for bit; slower."
    )
    max_batch_tokens: int | None = batching_option(
        None,
        help="Maximum number of tokens per step, over all requests.",
        check=at_least(1),
        aliases=("max_num_batched_tokens",),
        default_text="from the machine",
    )
    max_prefill_tokens: int | None = batching_option(
        None, help="Maximum number of prompt tokens per step.", check=at_least(1), default_text="as --max-batch-tokens"
    )
    max_batch_requests: int | None = batching_option(
        None,
        common=True,
        help="Maximum number of requests per step.",
        check=at_least(1),
        aliases=("max_num_seqs", "max_batch_size"),
        default_text="from the machine",
    )
    budget: str | None = batching_option(
        None,
        help="How much of --max-batch-tokens a step uses: all of it (fixed), so much that prompts are nearly as fast "
        "and requests that decode are not held up for long (knee), what the latency targets leave (latency), or what "
        "the targets of requests leave (slack).",
        choices=BUDGETS.names,
        default_text="latency if there is a target, slack with --order slack, else knee; fixed with LLM",
    )
    target_tpot_ms: float | None = batching_option(
        None, help="Target time per output token of running requests.", check=above(0), default_text="none"
    )
    target_ttft_ms: float | None = batching_option(
        None, help="Target time to the first token of new requests.", check=above(0), default_text="none"
    )
    policy: str = scheduling_option(
        "continuous",
        help="When requests are admitted: at every step (continuous), or in batches that run to the end (static, "
        "dynamic).",
        choices=POLICIES.names,
    )
    max_delay_ms: float | None = scheduling_option(
        None,
        help="How long a static or dynamic batch waits to be filled.",
        check=at_least(0),
        default_text="dynamic 50, static 10000",
    )
    order: str = scheduling_option(
        "fcfs",
        help="Which waiting request is admitted first: first come first served (fcfs), by priority, least work "
        "(shortest), short prompts sooner but none much later (boost), most cached tokens (cached), fair between "
        "tenants, also with the longest cached prefix first (fair, fair-cached), or by the targets of requests: the "
        "one due first (edf), the one that must begin first (slack).",
        choices=ORDERINGS.names,
        aliases=("scheduling_policy",),
    )
    tenant_weights: Mapping[str, float] | Sequence[str] | None = scheduling_option(
        None,
        help="A tenant's share with --order fair or fair-cached, such as alice=2; may be repeated.",
        check=_check_weights,
        flag="--tenant-weight",
        metavar="NAME=WEIGHT",
        default_text="1 each",
    )
    boost_seconds: float | None = scheduling_option(
        None,
        help="With --order boost, how much sooner a prompt comes that is a third (1/e) as long.",
        check=above(0),
        default_text="10",
    )
    priority_takes_slots: bool = scheduling_option(
        False,
        help="With --order priority, a request that finds no slot or memory takes that of a running one whose number "
        "is higher.",
    )
    learn_lengths: bool = scheduling_option(
        False,
        help="Learn how long the outputs of each tenant are. A request is then admitted only if memory is expected to "
        "last until the running ones end, and --order shortest goes by it.",
    )
    max_overtakes: int | None = scheduling_option(
        None,
        help="How often a waiting request may be passed over before it must be admitted next.",
        check=at_least(1),
        default_text="16, or 512 with --order slack or edf",
    )
    preemption: str = scheduling_option(
        "recompute",
        help="What happens to a request's KV blocks when memory runs out: recompute them later, swap them to host "
        "memory, or auto (whichever is measured to be cheaper).",
        choices=MODES,
    )
    images: str = model_option(
        "auto",
        help="Whether a model that can reads images: auto reads them where all that it takes is there, off leaves the "
        "memory of its vision part free.",
        choices=("auto", "on", "off"),
    )
    image_memory: int | str = model_option(
        "256MiB",
        help="Memory for what was encoded of images, which requests share.",
        check=parse_bytes,
        metavar="SIZE",
    )
    swap_memory: int | str | None = scheduling_option(
        None,
        help="Host memory for swapped blocks, such as 4GiB.",
        check=parse_bytes,
        metavar="SIZE",
        default_text="as much as the KV cache",
    )
    block_size: int = cache_option(16, help="Tokens per block of the KV cache.", check=at_least(1))
    kv_memory: int | str | None = cache_option(
        None,
        common=True,
        help="Memory for the KV cache and the states of recurrent layers, such as 2GiB.",
        check=parse_bytes,
        aliases=("kv_cache_memory_bytes",),
        metavar="SIZE",
        default_text="a share of the free memory",
    )
    state_memory: int | str | None = cache_option(
        None,
        help="Part of that memory for the states of recurrent layers: of running requests, draft tokens and snapshots "
        "of prefixes.",
        check=parse_bytes,
        metavar="SIZE",
        default_text="as many as there is a use for, up to half",
    )
    memory_share: float | None = cache_option(
        None,
        help="Share of the memory free after loading that the KV cache gets, instead of --kv-memory.",
        check=strictly_between(0, 1),
        aliases=("gpu_memory_utilization",),
        default_text="0.25 on a CPU, 0.9 on a GPU",
    )
    prefix_caching: bool = cache_option(
        True,
        help="Reuse the cached KV blocks of earlier prompts with the same prefix.",
        aliases=("enable_prefix_caching",),
    )
    kv_host_memory: int | str | None = cache_option(
        None,
        help="Host memory that keeps cached blocks which the device has no room for, such as 8GiB.",
        check=parse_bytes,
        metavar="SIZE",
        default_text="none",
    )
    kv_disk: str | Path | None = cache_option(  # noqa: RUF009 (options are declared by calls)
        None,
        help="Folder that keeps cached blocks on disk, also for later starts. Only this user can read it; it contains "
        "what prompts and outputs can be guessed from.",
        metavar="FOLDER",
        default_text="none",
    )
    kv_disk_size: int | str | None = cache_option(
        None, help="How large that folder may get.", check=parse_bytes, metavar="SIZE", default_text="50GiB"
    )
    kv_events: str | None = cache_option(
        None,
        help="Publish which blocks are cached at this address, such as tcp://*:5557, for gateways that route by it "
        "(vLLM's KV events over ZeroMQ). Who can reach it can read the prompts.",
        check=_check_address,
        metavar="ADDRESS",
        default_text="no",
    )
    kv_events_replay: str | None = cache_option(
        None,
        help="Address at which subscribers ask for messages that they missed, such as tcp://*:5558.",
        check=_check_address,
        metavar="ADDRESS",
        default_text="none",
    )
    kv_events_topic: str = cache_option(
        "", help="Topic of these messages, such as kv@POD@MODEL for llm-d.", default_text="empty"
    )
    speculate: str | None = speculation_option(
        None,
        common=True,
        help="Draft the next tokens and verify several in one step: from the text so far (ngram), with the model's "
        "first N layers (layers), or with a draft model (draft; see train-draft). The output does not change.",
        check=_check_speculate,
        forms=speculate_forms,
        default_text="no",
    )
    draft_length: int | None = speculation_option(
        None,
        help="Draft tokens per request and step.",
        check=at_least(1),
        aliases=("num_speculative_tokens",),
        default_text="from the measured speedup",
    )
    draft_graphs: bool = speculation_option(
        False, help="On a GPU, capture the passes of a draft model or head as CUDA graphs, and draft by one replay."
    )
    lora: Mapping[str, Any] | Sequence[str] | None = adapter_option(
        None,
        common=True,
        help="A LoRA adapter that requests may name: a folder of PEFT or a GGUF file; may be repeated.",
        check=_check_adapters,
        metavar="NAME=PATH",
        default_text="none",
    )
    max_loras: int | None = adapter_option(
        None,
        help="Adapters in memory at the same time; others are loaded when they are needed. Alone it leaves room for "
        "adapters that are added later.",
        check=at_least(1),
        default_text="64 if there are any",
    )
    lora_memory: int | str | None = adapter_option(
        None,
        help="Memory for adapters, such as 1GiB.",
        check=parse_bytes,
        metavar="SIZE",
        default_text="a sixteenth of the free memory",
    )
    seed: int | None = model_option(
        None,
        help="Seed for requests that have none.",
        check=at_least(0),
        default_text="random",
        on_command_line=False,  # There --seed is a sampling option.
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_combinations()

    def _check_combinations(self) -> None:
        check_budget(self.budget, self.target_tpot_ms, self.target_ttft_ms)
        check_mode(self.preemption, self.swap_memory)
        check_speculate(self.speculate, self.draft_length)
        if self.draft_graphs and self.speculate in (None, "ngram"):
            raise InvalidParameter("draft_graphs", "needs a draft model or head, named by speculate")
        if self.draft_graphs and not self.cuda_graphs:
            raise InvalidParameter("draft_graphs", "is not possible without cuda_graphs")
        self.make_policy()
        self.make_ordering()
        if self.weight_cache == "":
            raise InvalidParameter("weight_cache", "must be a folder, or off")
        if self.lora_memory is not None and not self.lora and self.max_loras is None:
            raise InvalidParameter("lora_memory", "needs lora or max_loras")
        if self.memory_share is not None and self.kv_memory is not None:
            raise InvalidParameter("memory_share", "was given together with kv_memory; give one")
        if self.max_batch_requests is not None and self.max_batch_tokens is not None:
            check_batch_requests(self.max_batch_requests, self.max_batch_tokens)
        for name in ("kv_host_memory", "kv_disk"):
            if getattr(self, name) is not None and not self.prefix_caching:
                raise InvalidParameter(name, "needs prefix_caching: it keeps what that finds")
        if self.kv_events is not None and not self.prefix_caching:
            raise InvalidParameter("kv_events", "needs prefix_caching, whose blocks are published")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            name = "kv_events_replay" if self.kv_events_replay is not None else "kv_events_topic"
            raise InvalidParameter(name, "needs an address, given by kv_events")
        if self.kv_disk == "":
            raise InvalidParameter("kv_disk", "must be a folder")
        if self.kv_disk_size is not None and self.kv_disk is None:
            raise InvalidParameter("kv_disk_size", "needs a folder, named by kv_disk")
        if self.quantize_head and self.quantization == "none":
            raise InvalidParameter("quantize_head", "needs a format for the weights, as in --quantization fp8")
        if self.batch_invariant and self.speculate not in (None, "ngram"):
            problem = f"is not possible with speculate={self.speculate!r}"
            reason = "the number of draft tokens depends on the load, and sampled drafts change the tokens"
            raise InvalidParameter("batch_invariant", f"{problem}: {reason}")

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.max_delay_ms)

    def make_ordering(self) -> Ordering:
        return make_ordering(
            self.order,
            parse_weights(self.tenant_weights),
            boost_seconds=self.boost_seconds,
            priority_takes_slots=self.priority_takes_slots or None,
        )


def check_batch_requests(requests: int, tokens: int) -> None:
    """Raise if a step cannot hold one token of each request."""
    if requests > tokens:
        raise InvalidParameter(
            "max_batch_requests", f"{requests} requests need a token each, but max_batch_tokens is {tokens}"
        )
