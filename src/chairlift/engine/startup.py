"""Starts an engine: resolve, load, plan memory, build, warm up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chairlift.config import EngineConfig
from chairlift.core.cost_model import CostModel
from chairlift.engine.adapters import EngineAdapters, make_adapters, open_configured
from chairlift.engine.engine import Engine
from chairlift.engine.load import LoadedModel, load
from chairlift.engine.memory_plan import MemoryPlan
from chairlift.engine.runner_factory import BuiltRunner, RunnerFactory
from chairlift.engine.scheduler_factory import make_scheduler
from chairlift.engine.settings import (
    EngineSettings,
    MachineSettings,
    check_recurrent_options,
    choose_max_model_len,
    resolve_engine,
    resolve_machine,
)
from chairlift.kernels.gpu import start_libraries
from chairlift.loading.embedding_config import EmbeddingConfig
from chairlift.loading.request_defaults import RequestDefaults
from chairlift.progress import StartTimeline, stages_shown
from chairlift.runner.base import ModelRunner
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.proposers.base import LoadedProposer, proposer_factory
from chairlift.structured.compiler import GrammarCompiler
from chairlift.structured.output import StructuredOutput, ThinkingBudgets
from chairlift.text.reasoning_formats.base import choose_reasoning
from chairlift.vision.model_images import ModelImages

__all__ = ["LoadedModel", "StartedEngine", "load_engine", "load_model", "start_engine"]

if TYPE_CHECKING:
    from chairlift.engine.kv_events import KVEvents


log = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine with the runner and the memory plan that it was built from."""

    engine: Engine
    runner: ModelRunner
    memory: MemoryPlan
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    described: str = ""  # the format of the weights and the device
    images: ModelImages | None = None  # how the model reads images, if it does
    endpoint: str = ""  # the one of OpenAI's API that suits the model best


def load_model(name: str, config: EngineConfig, *, progress: bool = True) -> LoadedModel:
    """Load a model and its tokenizer without an engine."""
    return load(name, resolve_machine(config), progress=progress)


def start_engine(
    loaded: LoadedModel, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
) -> StartedEngine:
    """Start an engine on a model, which others may use as well; it takes all times from `clock`."""
    return _start(loaded, resolve_machine(config), StartTimeline(), clock)


def load_engine(
    name: str, config: EngineConfig, *, progress: bool = True, timeline: StartTimeline | None = None
) -> StartedEngine:
    """Download `name` if it is not cached, load it, and start an engine on it."""
    timeline = timeline or StartTimeline()
    settings = resolve_machine(config)  # raises for contradictions before minutes of loading
    open_configured(config)
    with stages_shown(enabled=progress):
        libraries = start_libraries(settings.device, settings.dtype)
        try:
            loaded = load(name, settings, progress=progress, timeline=timeline)
        finally:
            libraries.wait()
        timeline.end("libraries")
        return _start(loaded, settings, timeline)


def _start(
    loaded: LoadedModel,
    machine: MachineSettings,
    timeline: StartTimeline,
    clock: Callable[[], float] = time.monotonic,
) -> StartedEngine:
    """Resolve what depends on the model, plan memory and build the runner, build the engine, warm up."""
    check_recurrent_options(machine.config, loaded.model)
    draft = load_draft(loaded, machine.config)
    settings = resolve_engine(machine, loaded.model, draft.layers if draft else ())
    structured = _make_structured_output(loaded, machine.config)
    adapters = make_adapters(machine.config, loaded.model)
    timeline.end("attention")
    reserved = adapters.pool.max_bytes if adapters else 0
    built = RunnerFactory(loaded.model, settings, structured, draft, loaded.images, timeline, reserved).build()
    engine = _make_engine(loaded, settings, built, structured, clock, adapters)
    built.runner.warm_up()
    timeline.end("warm_up")
    image_lines = loaded.images.lines() if loaded.images else ()
    own_lines = (_describe_step(settings, built), *_describe_rows(loaded, settings))
    for line in (*built.memory.lines(), *image_lines, *own_lines):
        log.info(line)
    for line in settings.lines():
        log.debug(f"chosen     {line}")
    return StartedEngine(
        engine,
        built.runner,
        built.memory,
        loaded.embedding,
        loaded.defaults,
        described=loaded.described,
        images=loaded.images,
        endpoint=_endpoint(loaded),
    )


def _endpoint(loaded: LoadedModel) -> str:
    if not loaded.embedding.generates:
        return "embeddings"
    return "completions" if loaded.tokenizer.chat_template is None else "chat/completions"


def load_draft(loaded: LoadedModel, config: EngineConfig) -> LoadedProposer | None:
    """Load what proposes draft tokens, if there are to be any."""
    if config.speculate is None:
        return None
    max_model_len = choose_max_model_len(config, loaded.model.max_len)
    return proposer_factory(config.speculate).load(loaded.model, loaded.tokenizer, max_model_len)


def _make_structured_output(loaded: LoadedModel, config: EngineConfig) -> StructuredOutput:
    vocab_size = loaded.model.vocab_size
    compiler = GrammarCompiler(loaded.tokenizer, vocab_size, loaded.eos_ids)
    reasoning = choose_reasoning(loaded.tokenizer.chat_template or "", config.reasoning_parser)
    return StructuredOutput(compiler, vocab_size, ThinkingBudgets(reasoning, loaded.tokenizer))


def _make_engine(
    loaded: LoadedModel,
    settings: EngineSettings,
    built: BuiltRunner,
    structured: StructuredOutput,
    clock: Callable[[], float],
    adapters: EngineAdapters | None,
) -> Engine:
    cost_model, speculation = CostModel(), None
    if built.proposer is not None:
        speculation = SpeculationController(
            built.proposer,
            draft_length=settings.config.draft_length,
            max_drafts=built.runner.capabilities.max_drafts,
            num_allowed=structured.num_allowed,
        )
    images = loaded.images
    cache = None if images is None else images.cache()
    return Engine(
        make_scheduler(
            settings, built, cost_model, speculation, adapters.pool if adapters else None, cache, loaded.weights
        ),
        built.runner,
        loaded.tokenizer,
        vocab_size=loaded.model.vocab_size,
        max_model_len=settings.max_model_len,
        eos_ids=loaded.eos_ids,
        end_strings=loaded.end_strings,
        seed=settings.config.seed,
        cost_model=cost_model,
        structured=structured,
        adapters=adapters,
        kv_events=_kv_events(settings.config),
        generates=loaded.embedding.generates,
        rotary_positions=None if images is None else images.encoder.positions,
        clock=clock,
    )


def _describe_rows(loaded: LoadedModel, settings: EngineSettings) -> list[str]:
    """Whether a request's greedy tokens on a CPU depend on what is computed with it, for the start-up log."""
    if settings.device.type != "cpu":
        return []
    reasons: list[str] = getattr(loaded.model, "batch_dependence", lambda: ["the code of transformers"])()
    if not settings.attention.capabilities.batch_invariant:
        reasons = [*reasons, f"{settings.attention.name} attention"]
    if not reasons:
        return ["tokens     the same alone, together and behind cached prefixes, bit for bit"]
    return [f"tokens     may depend on the batch and on cached prefixes: {', '.join(reasons)}"]


def _describe_step(settings: EngineSettings, built: BuiltRunner) -> str:
    """The limits of a step and the latency targets, for the start-up log."""
    config = settings.config
    step = f"up to {settings.max_batch_tokens} tokens ({settings.max_prefill_tokens} of prompts)"
    targets = {"per output token": config.target_tpot_ms, "to the first token": config.target_ttft_ms}
    words = [f"{target:g} ms {what}" for what, target in targets.items() if target is not None]
    if words:
        goal = f", at most {' and '.join(words)}"
    else:
        goal = ", at the throughput knee" if config.budget == "knee" else ""
    return f"step       {step} of {built.max_batch_requests} requests{goal}, {settings.attention.name} attention"


def _kv_events(config: EngineConfig) -> KVEvents | None:
    """The publisher of events of the KV cache, if one is asked for: without it, an engine needs neither ZeroMQ nor
    msgspec."""
    if config.kv_events is None:
        return None
    from chairlift.engine.kv_events import make_kv_events

    return make_kv_events(config)
