"""What an engine can be told, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chairlift.attention import BACKENDS
from chairlift.byte_sizes import parse_bytes
from chairlift.core.budgets.adaptive import check_budget
from chairlift.core.kv.swap import check_mode
from chairlift.core.orderings.base import Ordering, make_ordering, parse_weights
from chairlift.core.policies.base import Policy, make_policy
from chairlift.core.scheduler.waiting_queue import MAX_OVERTAKES
from chairlift.errors import InvalidParameter
from chairlift.speculation.control.option import check_speculate

LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("auto", "none", "int8", "fp8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """None means: chosen from the model and the machine."""

    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    quantization: str | None = "auto"  # none, int8 (CPU), fp8 (GPU; both: weights and their factors), auto
    kv_dtype: str = "auto"  # of the KV cache: auto, float32, bfloat16, float16, fp8 (GPU)
    max_model_len: int | None = None  # longest prompt + output; the model's own limit by default
    max_batch_tokens: int | None = None  # tokens per step, of all requests together
    max_prefill_tokens: int | None = None  # the part of those that may be prompt tokens
    max_batch_requests: int | None = None  # seats
    budget: str | None = None  # fixed, knee or latency: how much of those tokens a step uses; see docs/scheduling.md
    target_tpot_ms: float | None = None  # time per output token that running requests should keep
    target_ttft_ms: float | None = None  # time to the first token that new requests should keep
    block_size: int = 16
    kv_memory: int | str | None = None  # bytes, or "2GiB"
    memory_share: float | None = None  # without kv_memory: this share of the memory that is free after loading
    prefix_caching: bool = True
    policy: str = "continuous"  # when requests board: continuous, static, dynamic
    max_delay_ms: float | None = None  # how long a static or dynamic batch waits to be filled
    order: str = "fcfs"  # who boards first: fcfs, priority, shortest, fair
    tenant_weights: Mapping[str, float] | Sequence[str] | None = None  # for order fair: {"name": 2} or ["name=2"]
    preemption: str = "recompute"  # what becomes of a victim's KV blocks: recompute, swap (to the host), auto
    swap_memory: int | str | None = None  # host memory for that; as much as the KV cache by default
    max_overtakes: int = MAX_OVERTAKES  # how often a waiting request may be overtaken before nobody boards ahead of it
    speculate: str | None = None  # where guesses of the next tokens come from: ngram, layers:N, draft:PATH
    draft_length: int | None = None  # how many guesses at a time; by default as many as pay
    attention: str = "auto"
    batch_invariant: bool = False  # a request's tokens are the same, bit for bit, whatever shares its batch; slower
    cuda_graphs: bool = True  # on a GPU: capture steps and replay them
    load_format: str = "auto"  # dummy: random weights for a config.json
    seed: int | None = None  # makes the requests that bring no seed of their own repeatable

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batch_tokens", "max_prefill_tokens", "max_batch_requests"):
            _positive(name, getattr(self, name), optional=True)
        _positive("block_size", self.block_size)
        check_budget(self.budget, self.target_tpot_ms, self.target_ttft_ms)
        _positive("max_overtakes", self.max_overtakes)
        check_mode(self.preemption, self.swap_memory)
        check_speculate(self.speculate, self.draft_length)
        if self.swap_memory is not None:
            parse_bytes("swap_memory", self.swap_memory)
        self.make_policy()
        self.make_ordering()
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise InvalidParameter("dtype", f"unknown type {self.dtype!r}; choose from auto, {', '.join(DTYPES)}")
        if self.kv_dtype != "auto" and self.kv_dtype not in KV_DTYPES:
            choices = ", ".join(KV_DTYPES)
            raise InvalidParameter("kv_dtype", f"unknown type {self.kv_dtype!r}; choose from auto, {choices}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            choices = ", ".join(QUANTIZATIONS)
            raise InvalidParameter("quantization", f"unknown {self.quantization!r}; choose from {choices}")
        if self.attention != "auto" and self.attention not in BACKENDS:
            choices = ", ".join(BACKENDS)
            raise InvalidParameter("attention", f"unknown backend {self.attention!r}; choose from auto, {choices}")
        if self.load_format not in LOAD_FORMATS:
            choices = ", ".join(LOAD_FORMATS)
            raise InvalidParameter("load_format", f"unknown format {self.load_format!r}; choose from {choices}")
        for name in ("prefix_caching", "cuda_graphs", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"must be true or false, got {getattr(self, name)!r}")
        if self.batch_invariant and self.speculate not in (None, "ngram"):
            problem = (
                f"is not possible with speculate={self.speculate!r}: how many tokens are guessed depends on the load"
            )
            raise InvalidParameter("batch_invariant", f"{problem}, and drawn guesses decide over tokens")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise InvalidParameter("seed", f"must be an integer of at least 0, got {self.seed!r}")
        if self.kv_memory is not None:
            parse_bytes("kv_memory", self.kv_memory)
        if self.memory_share is not None:
            if isinstance(self.memory_share, bool) or not isinstance(self.memory_share, (int, float)):
                raise InvalidParameter("memory_share", f"must be a number, got {self.memory_share!r}")
            if not 0.0 < self.memory_share < 1.0:
                raise InvalidParameter("memory_share", f"must be above 0 and below 1, got {self.memory_share}")
            if self.kv_memory is not None:
                raise InvalidParameter("memory_share", "was given together with kv_memory; give one")
        self.torch_device()

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.max_delay_ms)

    def make_ordering(self) -> Ordering:
        return make_ordering(self.order, parse_weights(self.tenant_weights))

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise InvalidParameter("device", f"unknown device {self.device!r}; choose auto, cpu or cuda") from None
        if device.type not in ("cpu", "cuda"):
            raise InvalidParameter("device", f"{device.type!r} is not supported; choose auto, cpu or cuda")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidParameter("device", "torch sees no CUDA device here; choose cpu")
        return device

    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.float32 if self.torch_device().type == "cpu" else torch.bfloat16
        return DTYPES[self.dtype]

    def seats(self) -> int:
        """`max_batch_requests`, never more than the tokens of a step: a seat without a token is no use."""
        default = 1024 if self.torch_device().type == "cuda" else 64
        if self.max_batch_requests is None:
            return min(default, self.batch_tokens())
        if self.max_batch_requests > self.batch_tokens():
            problem = f"{self.max_batch_requests} requests need a token each, but max_batch_tokens is"
            raise InvalidParameter("max_batch_requests", f"{problem} {self.batch_tokens()}")
        return self.max_batch_requests

    def batch_tokens(self) -> int:
        """`max_batch_tokens`: by default what saturates the machine's arithmetic, and not much more, since every
        running request waits for the whole step."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        if self.torch_device().type == "cuda":
            return 8192
        return max(256, min(128 * (os.cpu_count() or 1), 2048))

    def for_throughput(self) -> EngineConfig:
        """The same where nobody watches tokens arrive: on a GPU steps may carry more, which saves launching some."""
        if self.max_batch_tokens is not None or self.torch_device().type != "cuda":
            return self
        return replace(self, max_batch_tokens=2 * self.batch_tokens())

    def prefill_tokens(self) -> int:
        """`max_prefill_tokens`: by default as many as fit in a step."""
        return min(self.max_prefill_tokens or self.batch_tokens(), self.batch_tokens())


def _positive(name: str, value: Any, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameter(name, f"must be an integer of at least 1, got {value!r}")
