"""Builds an engine from a model's name and a config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.choose import choose_backend
from chairlift.attention.interface import AttentionLayer
from chairlift.byte_sizes import format_bytes
from chairlift.config import EngineConfig
from chairlift.core.budgets.base import make_budget
from chairlift.core.cost_model import CostModel
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.state_slots import StateSlots
from chairlift.core.kv.swap import SwapCost, SwapSpace
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.tenant_isolation import make_tenant_isolation
from chairlift.core.scheduler.work_forecast import WorkForecast
from chairlift.engine.engine import Engine
from chairlift.engine.kv_dtype import check_kv_dtype
from chairlift.engine.load_memory import expected_weight_bytes, require_memory
from chairlift.engine.machine_defaults import (
    batch_requests,
    batch_tokens,
    num_threads,
    prefill_tokens,
    torch_device,
    torch_dtype,
    use_threads,
)
from chairlift.engine.memory_plan import MemoryPlan
from chairlift.engine.recurrent_options import check_recurrent_options
from chairlift.engine.runner_factory import BuiltRunner, RunnerFactory
from chairlift.engine.weight_cache import build_with_cache
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.kernels.gpu import on_gpu
from chairlift.kernels.gpu_start import start_libraries
from chairlift.layers.formats import FORMATS
from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.embedding_config import EmbeddingConfig, read_embedding_config
from chairlift.loading.read_ahead import read_ahead
from chairlift.loading.recommended_sampling import default_sampling, describe_sampling
from chairlift.loading.resolve import resolve_model
from chairlift.loading.stored_weight import dequantized_matrices
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.loading.weight_cache.store import WeightStore
from chairlift.machine.numa import interleaved
from chairlift.models import build_model, choose_implementation, describe, format_obstacles, is_native
from chairlift.models.base import CausalLM
from chairlift.models.dummy import DummyCheckpoint, dummy_tokenizer
from chairlift.models.wrappers import HEAD, canonical_name, text_config, text_part_notice
from chairlift.progress import loading_progress
from chairlift.runner.base import ModelRunner
from chairlift.runner.start_timeline import StartTimeline
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.control.option import drafts_per_request, proposer_factory
from chairlift.structured.compiler import GrammarCompiler
from chairlift.structured.output import StructuredOutput
from chairlift.structured.thinking import ThinkingBudgets
from chairlift.text.reasoning_formats.base import choose_reasoning
from chairlift.text.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

MIN_INT8_PARAMETERS = 20_000_000  # of models that are quantized by default: smaller ones fit into a CPU's caches
# Of GGUF files whose blocks a CPU computes with by default. With 135 million, 8 bits are as fast for one request and
# faster for several; with 1.1 billion, one request reads half as much (docs/cpu.md).
MIN_BLOCK_PARAMETERS = 500_000_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its tokenizer, which several engines can share."""

    name: str
    model: CausalLM
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters of requests that leave them out


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine with the runner and the memory plan that it was built from."""

    engine: Engine
    runner: ModelRunner
    memory: MemoryPlan
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    sampling: Mapping[str, float] = field(default_factory=dict)


def load_engine(
    name: str, config: EngineConfig, *, progress: bool = True, timeline: StartTimeline | None = None
) -> StartedEngine:
    """Download `name` if it is not cached, load it, and start an engine on it."""
    timeline = timeline or StartTimeline()
    batch_requests(config)  # raises for contradictions before minutes of loading
    libraries = start_libraries(torch_device(config), torch_dtype(config))
    try:
        loaded = load_model(name, config, progress=progress, timeline=timeline)
    finally:
        libraries.wait()
    timeline.end("libraries")
    return start_engine(loaded, config, timeline=timeline)


def load_model(
    name: str, config: EngineConfig, *, progress: bool = True, timeline: StartTimeline | None = None
) -> LoadedModel:
    """Load a model and its tokenizer."""
    timeline = timeline or StartTimeline()
    begun = time.perf_counter()
    check_kv_dtype(config.kv_dtype, torch_dtype(config), torch_device(config))
    timeline.end("device")
    checkpoint, tokenizer = _open(name, config, progress=progress)
    timeline.end("tokenizer")
    sampling = default_sampling(checkpoint.path, checkpoint.generation_config, config.generation_config)
    embedding = read_embedding_config(checkpoint)
    if not embedding.generates:  # the head is not used; this one needs no weights
        checkpoint.config["tie_word_embeddings"] = True
    elif text_config(checkpoint.config) is not checkpoint.config and config.load_format != "dummy":
        # Configs of larger models have a default in one place that contradicts the other.
        checkpoint.config["tie_word_embeddings"] = not any(canonical_name(name) == HEAD for name in checkpoint.names())
    choose_implementation(checkpoint.config, config.model_impl)
    info = describe(checkpoint.config)
    _max_model_len(config, info.max_len)
    if config.load_format != "dummy":
        _require_plausible_size(checkpoint, info.num_parameters)
    quantization = _quantization(config, checkpoint, info.num_parameters)
    _check_head(config, quantization)
    model = _build(checkpoint, quantization, info.num_parameters, config, progress=progress)
    timeline.end("weights")
    dtype = str(model.dtype).removeprefix("torch.") if quantization in ("none", "checkpoint") else quantization
    log.info(f"{Path(name).name}: loaded on {model.device} in {dtype} in {time.perf_counter() - begun:.1f} s")
    if notice := text_part_notice(checkpoint.config):
        log.info(f"parts      {notice}")
    if not is_native(checkpoint.config):
        from chairlift.models.fallback.model import NOTICE

        log.info(f"code       {NOTICE}")
    if checkpoint.quantization is not None:
        log.info(f"format     {checkpoint.quantization}: {_use_of_weights(model, quantization)}")
    if sampling and embedding.generates:
        source = "the model" if config.generation_config == "auto" else config.generation_config
        log.info(f"sampling   {describe_sampling(sampling)} where requests leave it out, from {source}")
    return LoadedModel(name, model, tokenizer, _eos_ids(checkpoint, tokenizer), embedding, sampling)


def _build(
    checkpoint: Checkpoint, quantization: str, num_parameters: int, config: EngineConfig, *, progress: bool
) -> CausalLM:
    """Build the model; on a CPU, state its memory first and use packed weights of an earlier start."""
    device, dtype = torch_device(config), torch_dtype(config)
    if quantization == "bfloat16" and dtype is torch.bfloat16:
        dtype = torch.float32  # the format of the products; all else is more exact

    def build(store: WeightStore) -> CausalLM:
        lazily = quantization == "checkpoint" or store.mapped_bytes > 0  # most weights will not be read
        stored = checkpoint.stored()
        with torch.inference_mode(), interleaved(), loading_progress(num_parameters, enabled=progress) as watched:
            return build_model(
                checkpoint.config,
                watched(read_ahead(stored if lazily else dequantized_matrices(stored))),
                dtype=dtype,
                device=device,
                max_len=config.max_model_len,
                quantization=quantization,
                quantize_head=config.quantize_head,
                batch_invariant=config.batch_invariant,
                weight_store=store,
            )

    if device.type != "cpu" or config.load_format == "dummy":
        return build(WeightStore())
    use_threads(num_threads(config))
    num_bytes = expected_weight_bytes(checkpoint, quantization, dtype)
    require_memory(checkpoint, num_bytes, dtype, config)
    return build_with_cache(build, checkpoint, quantization, num_bytes, config)


def _use_of_weights(model: CausalLM, quantization: str) -> str:
    """How the weights of a quantized checkpoint are computed with, for the startup log."""
    if quantization == "checkpoint":
        return f"as stored where possible (linear maps: {getattr(model, 'used_formats', 'not quantized')})"
    if quantization == "none":
        return f"dequantized to {str(model.dtype).removeprefix('torch.')}"
    return f"dequantized and rounded to {quantization}"


def _quantization(config: EngineConfig, checkpoint: Checkpoint, num_parameters: int) -> str:
    """The configured quantization. By default that of the checkpoint on a GPU; on a CPU that of a large GGUF file, or
    int8 where it is faster, unless a dtype is configured. bfloat16 is a format of its own on a CPU."""
    if config.quantization not in (None, "auto"):
        return config.quantization
    if checkpoint.quantization is not None and on_gpu(torch_device(config)):
        obstacles = format_obstacles(checkpoint.config, "checkpoint", torch_dtype(config), torch_device(config))
        return "none" if obstacles else "checkpoint"
    if num_parameters < MIN_INT8_PARAMETERS:
        return "none"
    if config.dtype != "auto":
        return "bfloat16" if _has_bfloat16_products(config, checkpoint) else "none"
    blocks = _computes_blocks(config, checkpoint, num_parameters)
    if not blocks and format_obstacles(checkpoint.config, "int8", torch_dtype(config), torch_device(config)):
        return "none"
    from chairlift.kernels.cpu.simd import PLAIN, find_instruction_set  # importing numba takes a while

    if find_instruction_set() is PLAIN:
        log.info("weights are not quantized: this CPU has no instructions for fast 8-bit products")
        return "none"
    return "checkpoint" if blocks else "int8"


def _check_head(config: EngineConfig, quantization: str) -> None:
    """Raise if the head cannot be quantized as configured."""
    if not config.quantize_head:
        return
    if quantization == "none":
        raise InvalidParameter("quantize_head", "needs a format for the weights, as in --quantization fp8")
    FORMATS.get(quantization).for_head(torch_dtype(config), torch_device(config), quantize=True)


def _has_bfloat16_products(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether a model in bfloat16 runs on the CPU's own kernels; others run on torch's."""
    if config.dtype != "bfloat16" or on_gpu(torch_device(config)) or not is_native(checkpoint.config):
        return False
    from chairlift.kernels.cpu.simd import HAS_AMX, HAS_BF16  # importing numba takes a while

    if not HAS_BF16 or HAS_AMX:  # torch's products are as fast or faster
        return False
    return not format_obstacles(checkpoint.config, "bfloat16", torch.float32, torch_device(config))


def _computes_blocks(config: EngineConfig, checkpoint: Checkpoint, num_parameters: int) -> bool:
    """Whether a CPU computes with the blocks of a GGUF file by default. Small models are faster in 8 bits: they are
    bound by arithmetic, not by reading weights."""
    if num_parameters < MIN_BLOCK_PARAMETERS or checkpoint.format != "gguf" or checkpoint.quantization is None:
        return False
    return not format_obstacles(checkpoint.config, "checkpoint", torch_dtype(config), torch_device(config))


def _open(name: str, config: EngineConfig, *, progress: bool) -> tuple[Checkpoint, Tokenizer]:
    if config.load_format == "dummy":
        dummy = DummyCheckpoint(name, torch_device(config))
        return dummy, make_tokenizer(dummy) if dummy.has_tokenizer else dummy_tokenizer()
    checkpoint = open_checkpoint(resolve_model(name, progress=progress))
    return checkpoint, make_tokenizer(checkpoint)


def start_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    timeline: StartTimeline | None = None,
) -> StartedEngine:
    """Size the KV cache and assemble the engine, which takes all times from `clock`."""
    timeline = timeline or StartTimeline()
    model = loaded.model
    check_recurrent_options(config, model)
    max_model_len = _max_model_len(config, model.max_len)
    factory = proposer_factory(config.speculate) if config.speculate else None
    draft = factory.load(model, loaded.tokenizer, max_model_len) if factory else None
    layers = (*model.attention_layers, *(draft.layers if draft else ()))
    attention = _choose_attention(config, model, layers, max_model_len)
    compiler = GrammarCompiler(loaded.tokenizer, model.vocab_size, loaded.eos_ids)
    reasoning = choose_reasoning(loaded.tokenizer.chat_template or "", config.reasoning_parser)
    structured = StructuredOutput(compiler, model.vocab_size, ThinkingBudgets(reasoning, loaded.tokenizer))
    timeline.end("attention")
    built = RunnerFactory(model, attention, config, max_model_len, structured, draft, timeline).build()
    runner, memory = built.runner, built.memory
    cost_model = CostModel()
    speculation = None
    if built.proposer is not None:
        speculation = SpeculationController(
            built.proposer,
            draft_length=config.draft_length,
            max_drafts=runner.capabilities.max_drafts,
            num_allowed=structured.num_allowed,
        )
    runner.warm_up()
    timeline.end("warm_up")
    engine = Engine(
        _make_scheduler(config, built, cost_model, speculation),
        runner,
        loaded.tokenizer,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_ids=loaded.eos_ids,
        seed=config.seed,
        cost_model=cost_model,
        structured=structured,
        generates=loaded.embedding.generates,
        clock=clock,
    )
    step = f"up to {batch_tokens(config)} tokens ({prefill_tokens(config)} of prompts)"
    for line in (
        *memory.lines(),
        f"step       {step} of {built.max_batch_requests} requests{_targets(config)}, {attention.name} attention",
    ):
        log.info(line)
    return StartedEngine(engine, runner, memory, loaded.embedding, loaded.sampling)


def _choose_attention(
    config: EngineConfig, model: CausalLM, layers: Sequence[AttentionLayer], max_model_len: int
) -> AttentionBackend:
    if config.batch_invariant and not getattr(model, "batch_invariant", False):
        raise InvalidParameter("batch_invariant", "this model was loaded without it")
    invariant_for = max_model_len if config.batch_invariant else None
    return choose_backend(config.attention, layers, model.device, model.dtype, invariant_for=invariant_for)


def _make_scheduler(
    config: EngineConfig,
    built: BuiltRunner,
    cost_model: CostModel,
    speculation: SpeculationController | None,
) -> Scheduler:
    prompts = prefill_tokens(config)
    drafts = drafts_per_request(config.speculate, config.draft_length)
    forecast = WorkForecast(cost_model, prompts, most_per_step=1 + drafts)
    ordering = config.make_ordering()
    return Scheduler(
        _make_cache(config, built.memory),
        make_budget(
            config.budget,
            cost_model,
            max_batch_tokens=batch_tokens(config),
            max_prefill_tokens=prompts,
            target_tpot_ms=config.target_tpot_ms,
            target_ttft_ms=config.target_ttft_ms,
        ),
        config.make_policy(),
        built.max_batch_requests,
        ordering=ordering,
        max_overtakes=config.max_overtakes,
        forecast=forecast,
        swap=_make_swap_space(config, built, forecast),
        speculation=speculation,
        tenant_isolation=make_tenant_isolation(ordering, cost_model, prompts),
    )


def _make_cache(config: EngineConfig, memory: MemoryPlan) -> KVCache:
    states = None
    if memory.num_states:
        states = StateSlots(
            memory.num_states,
            config.block_size,
            prefix_caching=config.prefix_caching,
            snapshot_interval=memory.snapshot_interval,
        )
    return KVCache(memory.num_blocks, config.block_size, prefix_caching=config.prefix_caching, states=states)


def _targets(config: EngineConfig) -> str:
    """The configured latency targets, for the startup log."""
    targets = {"per output token": config.target_tpot_ms, "to the first token": config.target_ttft_ms}
    words = [f"{target:g} ms {what}" for what, target in targets.items() if target is not None]
    if words:
        return f", at most {' and '.join(words)}"
    return ", at the throughput knee" if config.budget == "knee" else ""


def _make_swap_space(config: EngineConfig, built: BuiltRunner, forecast: WorkForecast) -> SwapSpace:
    host_blocks, memory = built.runner.host_blocks, built.memory
    if host_blocks is None:
        return SwapSpace()
    slots = host_blocks.num_slots
    if config.preemption == "swap":
        return SwapSpace(slots)
    speed = host_blocks.bytes_per_second()
    per_block = memory.bytes_per_token * memory.block_size
    log.info(f"swap       {slots:,} blocks on the host, {format_bytes(speed)}/s")
    return SwapSpace(slots, SwapCost(per_block, speed, forecast))


def _require_plausible_size(checkpoint: Checkpoint, num_parameters: int) -> None:
    """Raise if the files hold less than a bit per weight, before memory is allocated for them."""
    if num_parameters > 8 * checkpoint.num_bytes:
        raise CorruptCheckpoint(
            f"{checkpoint.path}: its config describes {num_parameters:,} weights, its files hold "
            f"{checkpoint.num_bytes:,} bytes: fetch it again"
        )


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """All end-of-sequence tokens: of the generation config, else of the model config, and of the tokenizer."""
    of_text = text_config(checkpoint.config).get("eos_token_id")
    listed = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id", of_text))
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(token, int) for token in ids):
        raise CorruptCheckpoint(f"{checkpoint.path}: eos_token_id must be a token id or a list, got {listed!r:.100}")
    found = set(ids)
    own = tokenizer.token_id(tokenizer.eos_token) if tokenizer.eos_token else None
    return frozenset(found | ({own} if own is not None else set()))


def _max_model_len(config: EngineConfig, limit: int) -> int:
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        problem = f"{config.max_model_len} is more than the {limit} tokens that the model was made for"
        raise InvalidParameter("max_model_len", problem)
    return config.max_model_len
