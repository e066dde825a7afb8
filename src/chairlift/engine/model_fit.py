"""Whether a model fits into the memory of this machine: in which format, with how much context, for how many requests.

It is the arithmetic of a start, without the weights: the formats that an engine would choose here, the first of them
that fits, and the KV cache that is planned beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from chairlift.attention.placement import place_layers
from chairlift.config import EngineConfig
from chairlift.engine.memory_plan import plan_memory
from chairlift.engine.model_check import REFUSED, ModelCheck
from chairlift.engine.settings import MIN_BLOCK_PARAMETERS, MIN_INT8_PARAMETERS, MachineSettings, resolve_machine
from chairlift.errors import InvalidParameter
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.none import PlainWeight
from chairlift.loading.known_models import known_models
from chairlift.loading.resolve import read_model_config
from chairlift.models import describe, format_obstacles, has_experts
from chairlift.models.base import ModelInfo
from chairlift.models.weight_sizes import weight_bytes
from chairlift.options import format_bytes
from chairlift.runner.memory import free_memory
from chairlift.vision.model_images import vision_bytes

TYPICAL_TOKENS = 2048  # Requests at once are counted with this many tokens each, prompt and answer.
LEAST_CONTEXT = 2048  # A cache for less is no use: the model does not fit.
STEP_BYTES_ON_GPU = 2 << 30  # about what the largest step takes beside weights and cache


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer to "does it fit this machine?"."""

    fits: bool
    device: str  # "CPU" or "GPU"
    format: str | None = None  # what the weights are stored as; None: no format is possible
    options: tuple[str, ...] = ()  # what the command that runs it so needs
    weight_bytes: int = 0
    free_bytes: int = 0
    context: int = 0  # tokens of one sequence
    requests: int = 0  # each has `TYPICAL_TOKENS` tokens, or the whole context if that is less
    missing: str | None = None  # what is too little
    nearest: str | None = None  # the largest known model that fits where this one does not
    nearest_command: str | None = None  # what runs that one here

    def command(self, model: str, verb: str = "serve") -> str:
        """The command that runs the model here, as a shell takes it."""
        return shlex.join(("chairlift", verb, model, *self.options))

    def sentence(self) -> str:
        """The first line of the answer."""
        if not self.fits:
            return f"no: {self.missing}"
        requests = "1 request" if self.requests == 1 else f"{self.requests:,} requests"
        requests += f" of {min(TYPICAL_TOKENS, self.context):,} tokens"
        return f"yes, with {self.format}, up to {self.context:,} tokens of context, {requests} at once"

    def memory(self) -> str:
        """The memory behind the answer."""
        free = format_bytes(self.free_bytes)
        return f"{format_bytes(self.weight_bytes)} of weights; {free} are free on the {self.device}"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A format of the weights, and the options that choose it."""

    format: str
    num_bytes: int
    kv_dtype: torch.dtype
    options: tuple[str, ...] = ()


def fit_model(name: str, checked: ModelCheck, config: EngineConfig | None = None, *, free: int | None = None) -> Fit:
    """Whether a model that was checked fits into `free` bytes, by default the memory that is free now; a model that is
    refused does not."""
    settings = resolve_machine(config or EngineConfig())
    device = "GPU" if on_gpu(settings.device) else "CPU"
    if checked.path == REFUSED:
        return Fit(False, device, missing=checked.reason)
    fit = _fit(dict(read_model_config(name).config), settings, checked.stored, checked.stored_bytes, free)
    return fit if fit.fits else _with_nearest(fit, name, checked, settings, free)


def _with_nearest(fit: Fit, name: str, checked: ModelCheck, settings: MachineSettings, free: int | None) -> Fit:
    """The answer with the largest known model below this one that fits, if there is one."""
    for model in reversed(known_models()):
        is_smaller = model.num_parameters < checked.num_parameters and name not in (model.name, model.hub_id)
        if is_smaller and (other := _fit(model.config, settings, None, None, free)).fits:
            return replace(fit, nearest=model.name, nearest_command=other.command(model.name))
    return fit


def _fit(
    config: Mapping[str, Any],
    settings: MachineSettings,
    stored: str | None,
    stored_bytes: int | None,
    free: int | None,
) -> Fit:
    device = "GPU" if on_gpu(settings.device) else "CPU"
    free = free_memory(settings.device) if free is None else free
    info = describe(config)
    wanted = settings.config.quantization
    if wanted in (None, "auto"):
        candidates = list(_candidates(config, info, settings, stored, stored_bytes))
    elif obstacles := format_obstacles(config, wanted, settings.dtype, settings.device):
        return Fit(False, device, missing=f"{wanted} is not possible: {'; '.join(obstacles)}")
    else:
        candidates = [_in_format(wanted, config, settings)]
    for_images = vision_bytes(config, "safetensors", settings.device.type, settings.config.images, settings.dtype)
    candidates = [replace(each, num_bytes=each.num_bytes + for_images) for each in candidates]
    for candidate in candidates:
        step_bytes = candidate.num_bytes + (STEP_BYTES_ON_GPU if on_gpu(settings.device) else 0)
        try:
            plan = plan_memory(
                info.attention_layers,
                weight_bytes=candidate.num_bytes,
                kv_memory=None,
                dtype=candidate.kv_dtype,
                device=settings.device,
                block_size=settings.config.block_size,
                max_model_len=info.max_len,
                max_batch_requests=settings.max_batch_requests,
                step_bytes=step_bytes,
                recurrent=info.recurrent_layers,
                free=free,
                placement=None if info.recurrent_layers else place_layers(info.attention_layers, info.max_len),
                step_tokens=settings.step_tokens,
            )
        except InvalidParameter:
            continue
        context = _rounded(min(info.max_len, plan.longest))
        if context < min(LEAST_CONTEXT, info.max_len):
            continue
        shorter = ("--max-model-len", str(context)) if context < info.max_len else ()
        typical = int(plan.sequences(min(TYPICAL_TOKENS, context)))
        requests = min(typical, plan.max_requests(settings.max_batch_requests))
        return Fit(
            True, device, candidate.format, (*candidate.options, *shorter), candidate.num_bytes, free, context, requests
        )
    smallest = min(candidates, key=lambda candidate: candidate.num_bytes)
    is_chosen = wanted == smallest.format
    title = smallest.format if is_chosen else f"the smallest format here, {smallest.format},"
    missing = (
        f"{title} takes {format_bytes(smallest.num_bytes)} of weights and a KV "
        f"cache beside them, and {format_bytes(free)} of the {device}'s memory are free"
    )
    return Fit(False, device, smallest.format, (), smallest.num_bytes, free, missing=missing)


def _in_format(format: str, config: Mapping[str, Any], settings: MachineSettings) -> _Candidate:
    """The format that the user asks for."""
    is_gpu = on_gpu(settings.device)
    num_bytes = weight_bytes(config, FORMATS.get(format), settings.dtype, "cuda" if is_gpu else "cpu")
    kv_dtype = settings.dtype if is_gpu or format == "none" else torch.bfloat16
    return _Candidate(format, num_bytes, kv_dtype, ("--quantization", format))


def _rounded(tokens: int) -> int:
    return tokens // 1024 * 1024 if tokens > LEAST_CONTEXT else tokens


def _candidates(
    config: Mapping[str, Any],
    info: ModelInfo,
    settings: MachineSettings,
    stored: str | None,
    stored_bytes: int | None,
) -> Iterator[_Candidate]:
    """The format that an engine chooses here by itself, then those that options choose, which are smaller."""
    dtype, device = settings.dtype, settings.device
    kind = "cuda" if on_gpu(device) else "cpu"

    def size(format: str, of: torch.dtype = dtype) -> int | None:
        """The bytes of the weights in a format; None where it is not possible."""
        if format_obstacles(config, format, of, device):
            return None
        return weight_bytes(config, FORMATS.get(format), of, kind)

    is_large_file = stored is not None and stored.startswith("GGUF") and info.num_parameters >= MIN_BLOCK_PARAMETERS
    if stored_bytes is not None and (is_large_file or (stored is not None and kind == "cuda")):
        yield _Candidate("the format of its files", stored_bytes, dtype)
    elif kind == "cuda" and isinstance(config.get("quantization_config"), dict) and (known := _gpu_bytes(config)):
        yield _Candidate("the format of its files", known, dtype)
    is_fast = kind == "cpu" and info.num_parameters >= MIN_INT8_PARAMETERS and settings.machine.has_fast_int8
    is_fast = is_fast and not has_experts(config)  # These keep their type unless a format is chosen.
    if is_fast and (int8 := size("int8")) is not None:
        yield _Candidate("int8", int8, torch.bfloat16)
    else:
        yield _Candidate(str(dtype).removeprefix("torch."), weight_bytes(config, PlainWeight, dtype, kind), dtype)
    for format in ("fp8", "int4") if kind == "cuda" else ("int8", "int4"):
        if size(format) is not None:
            yield _in_format(format, config, settings)
    if kind == "cpu":
        plain = weight_bytes(config, PlainWeight, torch.bfloat16, kind)
        yield _Candidate("bfloat16", plain, torch.bfloat16, ("--dtype", "bfloat16"))


def _gpu_bytes(config: Mapping[str, Any]) -> int | None:
    """The weights of a known model as its files have them."""
    return next((model.gpu_bytes for model in known_models() if model.config == config), None)
