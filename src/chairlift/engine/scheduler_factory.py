"""Builds the scheduler of an engine: its KV cache, budget, order and room for swapped blocks."""

from __future__ import annotations

import logging
import math
from functools import partial

from chairlift.core.adapters import AdapterPool
from chairlift.core.budgets.base import default_budget, make_budget
from chairlift.core.cost_model import CostModel, StepShape, WorkForecast
from chairlift.core.encoder_cache import EncoderCache
from chairlift.core.kv.kv_cache import HybridCache, KVCache
from chairlift.core.kv.swap import SwapCost, SwapSpace
from chairlift.core.lengths import OutputLengths
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.scheduler.tenant_isolation import make_tenant_isolation
from chairlift.engine.memory_plan import MemoryPlan
from chairlift.engine.runner_factory import BuiltRunner
from chairlift.engine.settings import EngineSettings
from chairlift.options import format_bytes
from chairlift.runner.tiers.opening import make_tiers
from chairlift.speculation.control.controller import SpeculationController

log = logging.getLogger("chairlift")


def make_scheduler(
    settings: EngineSettings,
    built: BuiltRunner,
    cost_model: CostModel,
    speculation: SpeculationController | None,
    adapters: AdapterPool | None = None,
    images: EncoderCache | None = None,
    weights: str = "",
) -> Scheduler:
    """`weights` tells the weights of the model from all others; without it, the KV cache cannot be kept on disk."""
    config, prompts = settings.config, settings.max_prefill_tokens
    forecast = WorkForecast(cost_model, prompts, most_per_step=1 + settings.drafts_per_request)
    ordering = config.make_ordering()
    has_target = config.target_tpot_ms is not None or config.target_ttft_ms is not None
    budget = make_budget(
        config.budget or default_budget(ordering.own_budget, has_target=has_target),
        cost_model,
        max_batch_tokens=settings.max_batch_tokens,
        max_prefill_tokens=prompts,
        target_tpot_ms=config.target_tpot_ms,
        target_ttft_ms=config.target_ttft_ms,
    )
    cache = _make_cache(settings, built.memory)
    tiers = make_tiers(config, built.runner, weights, cache.tiers_obstacle)
    if tiers is not None:
        cache.use_tiers(tiers, partial(_compute_seconds, forecast))
    return Scheduler(
        cache,
        budget,
        config.make_policy(),
        built.max_batch_requests,
        ordering=ordering,
        max_overtakes=config.max_overtakes,
        forecast=forecast,
        swap=_make_swap_space(settings, built, forecast),
        speculation=speculation,
        lengths=OutputLengths() if config.learn_lengths else None,
        adapters=adapters,
        images=images,
        tenant_isolation=make_tenant_isolation(ordering, cost_model.predict, prompts),
    )


def _make_cache(settings: EngineSettings, memory: MemoryPlan) -> KVCache:
    config = settings.config
    if not memory.num_states:
        return memory.make_cache(prefix_caching=config.prefix_caching)
    return HybridCache(
        memory.num_blocks,
        config.block_size,
        num_states=memory.num_states,
        snapshot_interval=memory.snapshot_interval,
        prefix_caching=config.prefix_caching,
    )


def _compute_seconds(forecast: WorkForecast, num_tokens: int, start: int) -> float:
    """How long a request waits for so many of its tokens; without end until enough steps are measured."""
    if not forecast.is_settled:
        return math.inf
    steps = -(-num_tokens // forecast.chunk)
    return steps * forecast.cost.predict(StepShape()) + forecast.recompute_seconds(num_tokens, start)


def _make_swap_space(settings: EngineSettings, built: BuiltRunner, forecast: WorkForecast) -> SwapSpace:
    host_blocks, memory = built.runner.host_blocks, built.memory
    if host_blocks is None:
        return SwapSpace()
    slots = host_blocks.num_slots
    if settings.config.preemption == "swap":
        return SwapSpace(slots)
    speed = host_blocks.bytes_per_second()
    log.info(f"swap       {slots:,} blocks on the host, {format_bytes(speed)}/s")
    return SwapSpace(slots, SwapCost(memory.bytes_per_block, speed, forecast.recompute_seconds))
