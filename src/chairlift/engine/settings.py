"""What `auto` and None in an `EngineConfig` mean on this machine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch

from chairlift.config import EngineConfig, check_batch_requests
from chairlift.errors import InvalidParameter
from chairlift.kernels.gpu import META, on_gpu
from chairlift.machine.cores import default_threads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

MAX_REQUESTS_ON_GPU, MAX_REQUESTS_ON_CPU = 1024, 64
BATCH_TOKENS_ON_GPU = 8192


def torch_device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda" and on_gpu(META):
        return META  # a GPU is described that is not here
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "torch sees no CUDA device here; choose cpu")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise InvalidParameter("device", f"{device} does not exist; there are {torch.cuda.device_count()} CUDA devices")
    return device


def torch_dtype(config: EngineConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if torch_device(config).type == "cpu" else torch.bfloat16
    return DTYPES[config.dtype]


def batch_tokens(config: EngineConfig) -> int:
    """`max_batch_tokens`: by default what saturates the machine's arithmetic, and not much more, since every running
    request waits for the whole step."""
    if config.max_batch_tokens is not None:
        return config.max_batch_tokens
    if on_gpu(torch_device(config)):
        return BATCH_TOKENS_ON_GPU
    return max(256, min(128 * num_threads(config), 2048))


def num_threads(config: EngineConfig) -> int:
    """`threads`: by default as many as there are cores that the process may use."""
    return config.threads or default_threads()


def use_threads(count: int) -> None:
    """Let torch and our kernels compute with this number of threads."""
    torch.set_num_threads(count)
    if find_spec("numba") is not None:
        from chairlift.kernels.cpu.threads import set_team_size

        set_team_size(count)


def prefill_tokens(config: EngineConfig) -> int:
    """`max_prefill_tokens`: by default as many as fit in a step."""
    return min(config.max_prefill_tokens or batch_tokens(config), batch_tokens(config))


def batch_requests(config: EngineConfig) -> int:
    """`max_batch_requests`: never more than the tokens of a step, since each request needs at least one."""
    tokens = batch_tokens(config)
    if config.max_batch_requests is None:
        return min(MAX_REQUESTS_ON_GPU if on_gpu(torch_device(config)) else MAX_REQUESTS_ON_CPU, tokens)
    check_batch_requests(config.max_batch_requests, tokens)
    return config.max_batch_requests


def for_throughput(config: EngineConfig) -> EngineConfig:
    """The config for offline use, where no user watches tokens arrive: steps on a GPU are larger and fewer."""
    if config.max_batch_tokens is not None or not on_gpu(torch_device(config)):
        return config
    return replace(config, max_batch_tokens=2 * batch_tokens(config))
