"""Loads a model and its tokenizer; on a CPU, states the memory that the weights will take first."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.settings import (
    NO_FAST_INT8,
    LoadSettings,
    MachineSettings,
    check_kv_dtype,
    resolve,
)
from chairlift.engine.weights import build_with_weights, weights_hash
from chairlift.errors import CorruptCheckpoint
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.recommended_sampling import describe_sampling, end_strings, given_ends
from chairlift.loading.request_defaults import OPTIONS, RequestDefaults, read_chat_template
from chairlift.loading.resolve import resolve_model
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import choose_implementation, describe, is_encoder, is_native
from chairlift.models.base import CausalLM
from chairlift.models.dummy import DummyCheckpoint, dummy_tokenizer
from chairlift.models.encoder import SEPARATOR
from chairlift.models.wrappers import HEAD, canonical_name, text_config, text_part_notice
from chairlift.options import parse_bytes
from chairlift.progress import StartTimeline
from chairlift.text.tokenizer import Tokenizer
from chairlift.vision.model_images import ModelImages, check_images, load_images

log = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its tokenizer, which several engines can share."""

    name: str
    model: CausalLM
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)  # what requests leave out
    end_strings: tuple[str, ...] = ()  # They end every output, as end-of-sequence tokens do.
    described: str = ""  # the format of the weights and the device, in words
    images: ModelImages | None = None  # how it reads images, if it does
    weights: str = ""  # a hash of what the weights were made from; empty if they are random


def load(
    name: str, base: MachineSettings, *, progress: bool = True, timeline: StartTimeline | None = None
) -> LoadedModel:
    """Load a model and its tokenizer."""
    timeline, config = timeline or StartTimeline(), base.config
    start = time.perf_counter()
    check_kv_dtype(config.kv_dtype, base.dtype, base.device)
    timeline.end("device")
    checkpoint, tokenizer = _open(name, base, progress=progress)
    timeline.end("tokenizer")
    given = {name: getattr(config, name) for name in OPTIONS}
    defaults = RequestDefaults.of(checkpoint.path, checkpoint.generation_config, given)
    generation = checkpoint.generation_config | given_ends(config.generation_config)
    embedding = read_embedding_config(checkpoint)
    _settle_tied_head(checkpoint, config, embedding)
    choose_implementation(checkpoint.config, config.model_impl)
    check_images(checkpoint, base.device.type, config.images)
    if is_encoder(checkpoint.config):
        checkpoint.config[SEPARATOR] = tokenizer.token_id("[SEP]")
    settings = resolve(base, checkpoint)
    if settings.reasons["quantization"] == NO_FAST_INT8:
        log.info(f"weights are not quantized: {NO_FAST_INT8}")
    num_parameters = describe(checkpoint.config).num_parameters
    if config.load_format != "dummy":
        _require_plausible_size(checkpoint, num_parameters)
    model = build_with_weights(checkpoint, settings, num_parameters, progress=progress)
    timeline.end("weights")
    images = load_images(
        checkpoint,
        model,
        tokenizer,
        wanted=config.images,
        memory=parse_bytes("image_memory", config.image_memory),
    )
    timeline.end("images")
    words = _log_model(name, model, checkpoint, settings, time.perf_counter() - start)
    if images is None and (notice := text_part_notice(checkpoint.config)):
        log.info(f"parts      {notice}")
    if defaults.sampling and embedding.generates:
        sources = ["the model" if config.generation_config == "auto" else config.generation_config]
        sources += ["override_generation_config"] if config.override_generation_config else []
        described = describe_sampling(defaults.sampling)
        log.info(f"sampling   {described} where requests leave it out, from {' and '.join(sources)}")
    eos_ids, ends = _eos_ids(checkpoint, generation, tokenizer), end_strings(checkpoint.path, generation)
    weights = "" if config.load_format == "dummy" else weights_hash(checkpoint, settings)
    return LoadedModel(name, model, tokenizer, eos_ids, embedding, defaults, ends, words, images, weights)


def _settle_tied_head(checkpoint: Checkpoint, config: EngineConfig, embedding: EmbeddingConfig) -> None:
    """Note in the checkpoint's config whether the head is the embedding table, where that is not clear from it."""
    if not embedding.generates:  # the head is not used; this one needs no weights
        checkpoint.config["tie_word_embeddings"] = True
    elif text_config(checkpoint.config) is not checkpoint.config and config.load_format != "dummy":
        # Configs of larger models have a default in one place that contradicts the other.
        checkpoint.config["tie_word_embeddings"] = not any(canonical_name(name) == HEAD for name in checkpoint.names())


def _open(name: str, settings: MachineSettings, *, progress: bool) -> tuple[Checkpoint, Tokenizer]:
    if settings.config.load_format == "dummy":
        dummy = DummyCheckpoint(name, settings.device)
        return dummy, make_tokenizer(dummy) if dummy.has_tokenizer else dummy_tokenizer()
    checkpoint = open_checkpoint(resolve_model(name, progress=progress))
    return checkpoint, make_tokenizer(checkpoint, read_chat_template(settings.config.chat_template))


def _log_model(name: str, model: CausalLM, checkpoint: Checkpoint, settings: LoadSettings, seconds: float) -> str:
    """Log what was loaded; return the format of its weights and the device."""
    quantization = settings.quantization
    dtype = str(model.dtype).removeprefix("torch.") if quantization in ("none", "checkpoint") else quantization
    log.info(f"{Path(name).name}: loaded on {model.device} in {dtype} in {seconds:.1f} s")
    if not (is_native(checkpoint.config) or is_encoder(checkpoint.config)):
        from chairlift.models.fallback.model import NOTICE

        log.info(f"code       {NOTICE}")
    if checkpoint.quantization is not None:
        log.info(f"format     {checkpoint.quantization}: {_use_of_weights(model, quantization)}")
    for line in settings.lines():
        log.debug(f"chosen     {line}")
    stored = str(checkpoint.quantization or "").removeprefix("GGUF, ").partition(",")[0]
    return f"{f'{stored} as ' if stored else ''}{dtype} on {model.device}"


def _use_of_weights(model: CausalLM, quantization: str) -> str:
    """How the weights of a quantized checkpoint are computed with, for the startup log."""
    if quantization == "checkpoint":
        return f"as stored where possible (linear maps: {getattr(model, 'used_formats', 'not quantized')})"
    if quantization == "none":
        return f"dequantized to {str(model.dtype).removeprefix('torch.')}"
    return f"dequantized and rounded to {quantization}"


def _require_plausible_size(checkpoint: Checkpoint, num_parameters: int) -> None:
    """Raise if the files hold less than a bit per weight, before memory is allocated for them."""
    if num_parameters > 8 * checkpoint.num_bytes:
        raise CorruptCheckpoint(
            f"{checkpoint.path}: its config describes {num_parameters:,} weights, its files hold "
            f"{checkpoint.num_bytes:,} bytes: fetch it again"
        )


def _eos_ids(checkpoint: Checkpoint, generation: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """All end-of-sequence tokens: of the generation config, else of the model config, and of the tokenizer."""
    of_text = text_config(checkpoint.config).get("eos_token_id")
    listed = generation.get("eos_token_id", checkpoint.config.get("eos_token_id", of_text))
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(token, int) for token in ids):
        raise CorruptCheckpoint(f"{checkpoint.path}: eos_token_id must be a token id or a list, got {listed!r:.100}")
    own = tokenizer.token_id(tokenizer.eos_token) if tokenizer.eos_token else None
    return frozenset(ids if own is None else [*ids, own])
