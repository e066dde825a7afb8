"""What an engine runs with: each value that a config leaves open is chosen here, once, with its reason.

What depends on the machine alone is in `MachineSettings`, what the weights are loaded with in `LoadSettings`, and what
an engine is built with, once it has a model, in `EngineSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from chairlift.attention.backends.base import AttentionBackend, choose_backend
from chairlift.attention.interface import AttentionLayer
from chairlift.config import EngineConfig, check_batch_requests
from chairlift.core.budgets.base import ONLINE, default_budget
from chairlift.errors import InvalidParameter
from chairlift.kernels.gpu import META, on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import head_format
from chairlift.layers.formats.fp8 import FP8, fp8_obstacles
from chairlift.loading.checkpoint import Checkpoint
from chairlift.machine.hardware import default_threads
from chairlift.models import describe, format_obstacles, has_experts, is_native
from chairlift.models.base import CausalLM
from chairlift.speculation.proposers.base import drafts_per_request

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

MAX_REQUESTS_ON_GPU, MAX_REQUESTS_ON_CPU = 1024, 64
BATCH_TOKENS_ON_GPU = 8192
MIN_INT8_PARAMETERS = 20_000_000  # Models below this are not quantized by default: they fit into a CPU's caches.
# A CPU computes with the blocks of larger GGUF files by default. With 135 million weights, 8 bits are as fast for one
# request and faster for several; with 1.1 billion, one request reads half as much (docs/cpu.md).
MIN_BLOCK_PARAMETERS = 500_000_000

T = TypeVar("T")

CONFIGURED = "as configured"
NO_FAST_INT8 = "this CPU has no instructions for fast 8-bit products"


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a machine from which values are chosen."""

    num_gpus: int
    num_threads: int
    describes_gpu: bool = False  # torch's meta device stands for a GPU that is not here

    @classmethod
    def here(cls) -> Machine:
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(num_gpus, default_threads(), on_gpu(META))

    @property
    def has_fast_int8(self) -> bool:
        """Whether its CPU has instructions for fast 8-bit products."""
        from chairlift.kernels.cpu.simd import PLAIN, find_instruction_set  # importing numba takes a while

        return find_instruction_set() is not PLAIN

    @property
    def needs_bfloat16_kernels(self) -> bool:
        """Whether its CPU multiplies bfloat16 faster with our kernels than with torch's."""
        from chairlift.kernels.cpu.simd import HAS_AMX, HAS_BF16  # importing numba takes a while

        return HAS_BF16 and not HAS_AMX


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSettings:
    """What follows from a config on a machine, whatever the model is."""

    config: EngineConfig
    machine: Machine
    device: torch.device
    dtype: torch.dtype  # The type of weights and activations, unless the format of the weights needs another.
    threads: int
    max_batch_tokens: int
    max_prefill_tokens: int
    max_batch_requests: int
    reasons: Mapping[str, str]  # The keys are names of values.

    @property
    def drafts_per_request(self) -> int:
        """The most draft tokens of a request in one step."""
        return drafts_per_request(self.config.speculate, self.config.draft_length)

    @property
    def step_tokens(self) -> int:
        """The most tokens of a request that are planned and not computed: on a GPU, those of two steps."""
        of_step = max(self.max_prefill_tokens, 1 + self.drafts_per_request)
        return 2 * of_step if on_gpu(self.device) else of_step

    def lines(self) -> list[str]:
        """Every chosen value with its reason, for the log."""
        return [f"{name} {_words(getattr(self, name))}: {reason}" for name, reason in self.reasons.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(MachineSettings):
    """What the weights of a checkpoint are loaded with."""

    quantization: str
    model_dtype: torch.dtype  # `dtype`, or what the format of the weights is multiplied with
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(MachineSettings):
    """What an engine on a loaded model is built with."""

    kv_dtype: torch.dtype
    max_model_len: int
    attention: AttentionBackend


def resolve_machine(config: EngineConfig, machine: Machine | None = None) -> MachineSettings:
    """Choose what does not depend on a model; raises for contradictions and for devices that are not there."""
    machine, reasons = machine or Machine.here(), _Reasons(config)
    device = _device(config, machine, reasons)
    on_cpu, of_gpu = device.type == "cpu", on_gpu(device)
    dtype = reasons.choose(
        "dtype", "float32" if on_cpu else "bfloat16", f"the default on a {'CPU' if on_cpu else 'GPU'}"
    )
    threads = reasons.choose("threads", machine.num_threads, "one per physical core that the process may use")
    # On a CPU not much more than saturates it, since every running request waits for the whole step.
    saturating = BATCH_TOKENS_ON_GPU if of_gpu else max(256, min(128 * threads, 2048))
    max_batch_tokens = reasons.choose("max_batch_tokens", saturating, "what saturates the arithmetic of this machine")
    max_prefill_tokens = reasons.choose("max_prefill_tokens", max_batch_tokens, "as many as fit in a step")
    most_requests = min(MAX_REQUESTS_ON_GPU if of_gpu else MAX_REQUESTS_ON_CPU, max_batch_tokens)
    max_batch_requests = reasons.choose(
        "max_batch_requests", most_requests, "the default here, one token each at least"
    )
    check_batch_requests(max_batch_requests, max_batch_tokens)
    return MachineSettings(
        config=config,
        machine=machine,
        device=device,
        dtype=DTYPES[dtype],
        threads=threads,
        max_batch_tokens=max_batch_tokens,
        max_prefill_tokens=min(max_prefill_tokens, max_batch_tokens),
        max_batch_requests=max_batch_requests,
        reasons=reasons,
    )


def resolve(base: MachineSettings, checkpoint: Checkpoint) -> LoadSettings:
    """Choose what the weights of a checkpoint are loaded with; raises for what is not possible with them."""
    reasons = _Reasons(base.config, base.reasons)
    max_model_len = choose_max_model_len(base.config, describe(checkpoint.config).max_len)
    reasons.note("max_model_len", "the model's limit")
    quantization, reasons["quantization"] = _quantization(base, checkpoint)
    _check_head(base, quantization)
    model_dtype = base.dtype
    if quantization == "bfloat16" and base.dtype is torch.bfloat16:
        model_dtype = torch.float32
        reasons["model_dtype"] = "bfloat16 is the format of the products; all else is more exact"
    values = _values(base) | {"reasons": reasons}
    return LoadSettings(**values, quantization=quantization, model_dtype=model_dtype, max_model_len=max_model_len)


def resolve_engine(
    base: MachineSettings, model: CausalLM, draft_layers: Sequence[AttentionLayer] = ()
) -> EngineSettings:
    """Choose what an engine on this model is built with; `draft_layers` are what a draft adds to the KV cache."""
    config, reasons = base.config, _Reasons(base.config, base.reasons)
    max_model_len = choose_max_model_len(config, model.max_len)
    if config.batch_invariant and not getattr(model, "batch_invariant", False):
        raise InvalidParameter("batch_invariant", "this model was loaded without it")
    layers = (*model.attention_layers, *draft_layers)
    invariant_for = max_model_len if config.batch_invariant else None
    attention = choose_backend(config.attention, layers, model.device, model.dtype, invariant_for=invariant_for)
    reasons.note("max_model_len", "the model's limit")
    reasons.note("kv_dtype", "what loses nothing beside the format of the weights")
    reasons.note("attention", "the fastest that can run this model here")
    values = _values(base) | {"reasons": reasons}
    return EngineSettings(**values, kv_dtype=kv_dtype(config, model), max_model_len=max_model_len, attention=attention)


def for_throughput(config: EngineConfig, machine: Machine | None = None) -> EngineConfig:
    """The config for offline use, where no user watches tokens arrive: steps on a GPU are larger and fewer."""
    settings = resolve_machine(config, machine)
    if config.max_batch_tokens is not None or not on_gpu(settings.device):
        return config
    return replace(config, max_batch_tokens=2 * settings.max_batch_tokens)


def for_latency(config: EngineConfig) -> EngineConfig:
    """The config for online use: without any target, prompts leave most of the steps' time to those who decode."""
    has_target = config.target_tpot_ms is not None or config.target_ttft_ms is not None
    own = config.make_ordering().own_budget
    return replace(config, budget=config.budget or default_budget(own, has_target=has_target, otherwise=ONLINE))


class _Reasons(dict[str, str]):
    """Why each value was chosen, by its name, which is that of an option of the config."""

    def __init__(self, config: EngineConfig, known: Mapping[str, str] | None = None) -> None:
        super().__init__(known or {})
        self._config = config

    def choose(self, name: str, default: T, reason: str) -> T:
        """The configured value, or the default, for which this is the reason."""
        self.note(name, reason)
        configured: T = getattr(self._config, name)
        return default if configured in (None, "auto") else configured

    def note(self, name: str, reason: str) -> None:
        self[name] = reason if getattr(self._config, name) in (None, "auto") else CONFIGURED


def _device(config: EngineConfig, machine: Machine, reasons: _Reasons) -> torch.device:
    default = "cuda" if machine.num_gpus else "cpu"
    reason = "this machine has a GPU" if machine.num_gpus else "this machine has no GPU"
    device = torch.device(reasons.choose("device", default, reason))
    if config.device == "auto":
        return device
    if device.type == "cuda" and machine.describes_gpu:
        reasons["device"] = "a GPU is described that is not here"
        return META
    if device.type == "cuda" and not machine.num_gpus:
        raise InvalidParameter("device", "torch sees no CUDA device here; choose cpu")
    if device.index is not None and device.index >= machine.num_gpus:
        raise InvalidParameter("device", f"{device} does not exist; there are {machine.num_gpus} CUDA devices")
    return device


def _quantization(settings: MachineSettings, checkpoint: Checkpoint) -> tuple[str, str]:
    """The format of the weights, and why.

    By default that of the checkpoint on a GPU; on a CPU that of a large GGUF file, or int8 where it is faster, unless a
    dtype is configured. bfloat16 is a format of its own on a CPU.
    """
    config, machine, device, dtype = settings.config, settings.machine, settings.device, settings.dtype
    if config.quantization not in (None, "auto"):
        return config.quantization, CONFIGURED

    def obstacles(format: str, of: torch.dtype = dtype) -> list[str]:
        return format_obstacles(checkpoint.config, format, of, device)

    num_parameters = describe(checkpoint.config).num_parameters
    if checkpoint.quantization is not None and on_gpu(device):
        reasons = obstacles("checkpoint")
        if reasons:
            return "none", f"the form of the checkpoint is not possible: {'; '.join(reasons)}"
        return "checkpoint", "a GPU computes with the form of the checkpoint"
    if num_parameters < MIN_INT8_PARAMETERS:
        return "none", "a model this small fits into a CPU's caches"
    if config.dtype != "auto":
        is_for_kernels = config.dtype == "bfloat16" and not on_gpu(device) and is_native(checkpoint.config)
        if is_for_kernels and machine.needs_bfloat16_kernels and not obstacles("bfloat16", torch.float32):
            return "bfloat16", "our kernels multiply bfloat16 faster than torch's here"
        return "none", "a dtype is configured"
    # Small models are faster in 8 bits than in the blocks of a file: they are bound by arithmetic, not by reading.
    is_large_file = checkpoint.format == "gguf" and num_parameters >= MIN_BLOCK_PARAMETERS
    in_blocks = is_large_file and checkpoint.quantization is not None and not obstacles("checkpoint")
    reasons = [] if in_blocks else obstacles("int8")
    if not in_blocks and not reasons and has_experts(checkpoint.config):
        return "none", "a model with experts keeps its type unless int8 or int4 is chosen"
    if reasons:
        return "none", f"int8 is not possible: {'; '.join(reasons)}"
    if not machine.has_fast_int8:
        return "none", NO_FAST_INT8
    if in_blocks:
        return "checkpoint", "a CPU computes with the blocks of a large GGUF file"
    return "int8", "8-bit weights are faster on this CPU"


def _check_head(settings: MachineSettings, quantization: str) -> None:
    """Raise if the head cannot be quantized as configured."""
    if not settings.config.quantize_head:
        return
    if quantization == "none":
        raise InvalidParameter("quantize_head", "needs a format for the weights, as in --quantization fp8")
    head_format(FORMATS.get(quantization), settings.dtype, settings.device, quantize=True)


def choose_max_model_len(config: EngineConfig, limit: int) -> int:
    """The longest sequence, at most the model's limit."""
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        problem = f"{config.max_model_len} is more than the {limit} tokens that the model was made for"
        raise InvalidParameter("max_model_len", problem)
    return config.max_model_len


def kv_dtype(config: EngineConfig, model: CausalLM) -> torch.dtype:
    """The type of the KV cache: by default that of the model, or bfloat16 where the weights are int8 or bfloat16."""
    if config.kv_dtype == "auto":
        return model.kv_dtype
    check_kv_dtype(config.kv_dtype, model.dtype, model.device)
    return KV_DTYPES[config.kv_dtype]


def check_kv_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> None:
    """Raise if a model in `model_dtype` on `device` cannot have a KV cache of this dtype."""
    if name == "auto":
        return
    dtype = KV_DTYPES[name]
    if dtype is FP8:
        reasons = fp8_obstacles(device)
        if model_dtype is torch.float32:
            reasons.append("a model in float32 would lose most of what it computes")
        if reasons:
            raise InvalidParameter("kv_dtype", f"fp8 is not possible: {'; '.join(reasons)}")
    elif dtype is not model_dtype and (device.type != "cpu" or dtype is torch.float16):
        raise InvalidParameter("kv_dtype", f"{name} is not possible for a model in {model_dtype} on {device.type}")


def check_recurrent_options(config: EngineConfig, model: CausalLM) -> None:
    """Raise InvalidParameter for an option that cannot work with the recurrent layers of a model, or needs some."""
    if not model.recurrent_layers:
        if config.state_memory is not None:
            raise InvalidParameter("state_memory", "the model has no recurrent layers")
        return
    if config.preemption == "swap" or config.swap_memory is not None:
        name = "preemption" if config.preemption == "swap" else "swap_memory"
        problem = "the model has recurrent layers, whose states are not swapped to host memory"
        raise InvalidParameter(name, f"{problem}; preempted requests are recomputed (preemption recompute)")
    if config.speculate is not None and config.speculate.startswith("layers:"):
        problem = "the model has recurrent layers, whose states a draft would have to read and write"
        raise InvalidParameter("speculate", f"{problem}; use ngram or draft:PATH")
    if config.batch_invariant and model.device.type == "cuda":
        problem = "the model has recurrent layers, whose results on a GPU depend on how a prompt is cut into steps"
        raise InvalidParameter("batch_invariant", problem)


def _values(settings: MachineSettings) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _words(value: Any) -> str:
    """A value as the log shows it."""
    return getattr(value, "name", None) or str(value).removeprefix("torch.")
