"""Builds a runner with its KV cache, whose size depends on the memory that the runner's steps take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.placement import Placement, place_layers
from chairlift.core.kv.state_slots import MIN_SLOTS
from chairlift.engine.memory_plan import SNAPSHOTS_PER_REQUEST, MemoryPlan, plan_host_slots, plan_memory
from chairlift.engine.settings import EngineSettings
from chairlift.errors import InvalidParameter
from chairlift.models.base import CausalLM
from chairlift.progress import StartTimeline
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.encoder import EncoderRunner
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import StepSizes
from chairlift.runner.images import ImageRunner
from chairlift.runner.memory import HostBlocks, allocate_states, allocate_storage
from chairlift.speculation.drafter import Drafter
from chairlift.speculation.proposers.base import LoadedProposer, Proposer
from chairlift.structured.output import StructuredOutput
from chairlift.vision.model_images import ModelImages

MAX_DRAFTS_ON_GPU = 256  # draft tokens per step: beyond some hundred rows, arithmetic takes what a draft is to save


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    runner: ModelRunner
    memory: MemoryPlan
    max_batch_requests: int
    proposer: Proposer | None  # what proposes draft tokens


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """All that a runner is made of except its cache."""

    model: CausalLM
    settings: EngineSettings
    structured: StructuredOutput | None
    draft: LoadedProposer | None
    images: ModelImages | None = None
    timeline: StartTimeline = field(default_factory=StartTimeline)
    adapter_bytes: int = 0  # memory of adapters, which are loaded later

    def build(self) -> BuiltRunner:
        """Build the runner; return it with its memory plan and batch-size limit."""
        memory, max_requests = self._plan()
        step_bytes = 0
        if self.settings.attention.capabilities.captures:
            # Steps on a GPU need memory too, and more of it the more requests they have.
            rows = max_requests + self._max_drafts
            self.settings.attention.reserve(self._layers, rows, self.model.dtype, self.model.device)
            measures = _measures_steps(self.model.device)
            step_bytes, state_bytes = self._measure_step(memory, max_requests) if measures else (0, 0)
            memory, limit = self._plan(step_bytes + state_bytes)
            max_requests = min(max_requests, limit)
        elif self.settings.config.draft_graphs:
            raise InvalidParameter("draft_graphs", "needs a GPU, and attention that can be captured there")
        runner, proposer = self._make_runner(memory, max_requests, step_bytes)
        self.timeline.end("cache")
        return BuiltRunner(runner, memory, max_requests, proposer)

    @property
    def _layers(self) -> tuple[AttentionLayer, ...]:
        return (*self.model.attention_layers, *(self.draft.layers if self.draft else ()))

    @property
    def _placement(self) -> Placement | None:
        """Where the layers' keys and values are; None: in blocks of all layers, as states need them."""
        if self.model.recurrent_layers or not self.settings.attention.capabilities.several_tables:
            return None
        num_drafting = len(self.draft.layers) if self.draft else 0
        return place_layers(self._layers, self.settings.max_model_len, num_drafting=num_drafting)

    @property
    def _max_drafts(self) -> int:
        return 0 if self.draft is None else min(MAX_DRAFTS_ON_GPU, self.settings.max_batch_tokens)

    def _plan(self, step_bytes: int = 0) -> tuple[MemoryPlan, int]:
        """The memory plan beside `step_bytes` for the largest step, and how many requests may run."""
        config = self.settings.config
        memory = plan_memory(
            self._layers,
            weight_bytes=self.model.num_weight_bytes() + (self.draft.weight_bytes if self.draft else 0),
            kv_memory=config.kv_memory,
            memory_share=config.memory_share,
            dtype=self.settings.kv_dtype,
            device=self.model.device,
            block_size=config.block_size,
            max_model_len=self.settings.max_model_len,
            max_batch_requests=self.settings.max_batch_requests,
            step_bytes=step_bytes,
            adapter_bytes=self.adapter_bytes,
            mapped_bytes=self.model.num_mapped_bytes(),
            recurrent=self.model.recurrent_layers,
            state_memory=config.state_memory,
            placement=self._placement,
            step_tokens=self.settings.step_tokens,
            states_per_request=1
            + self.settings.drafts_per_request
            + (SNAPSHOTS_PER_REQUEST if config.prefix_caching else 1),
        )
        return memory, config.max_batch_requests or memory.max_requests(self.settings.max_batch_requests)

    def _measure_step(self, memory: MemoryPlan, max_requests: int) -> tuple[int, int]:
        """Bytes of the largest step, computed with a cache of one block, and of the states for a draft head."""
        smallest = replace(memory, num_blocks=1, num_states=MIN_SLOTS)
        try:
            runner, _ = self._make_runner(smallest, max_requests, measures=True)
        except torch.OutOfMemoryError:
            problem = "the inputs of this many requests take more memory than the weights leave; lower it"
            raise InvalidParameter("max_batch_requests", problem) from None
        assert isinstance(runner, GPURunner)
        try:
            runner.preparation.compile_generic()
            self.timeline.end("kernels")
            step_bytes = runner.measure_largest_step()
            return step_bytes, runner.drafter.release()
        except torch.OutOfMemoryError:
            problem = "a step of this many tokens takes more memory than the weights leave; lower it"
            raise InvalidParameter("max_batch_tokens", problem) from None
        finally:
            self.timeline.end("memory")

    def _make_runner(
        self, memory: MemoryPlan, max_requests: int, step_bytes: int = 0, *, measures: bool = False
    ) -> tuple[ModelRunner, Proposer | None]:
        """The runner and what proposes draft tokens; `measures`: only the memory of a step is measured with them."""
        settings, config, device = self.settings, self.settings.config, self.model.device
        kv_dtype, placement = settings.kv_dtype, memory.placement
        storage = allocate_storage(self._layers, memory.num_blocks, memory.block_size, kv_dtype, device, placement)
        states = allocate_states(self.model.recurrent_layers, memory.num_states, device)
        proposer: Proposer | None = None
        host_blocks: HostBlocks | None = None
        if self.draft is not None:
            repeatable = measures or config.seed is not None
            proposer = self.draft.make(settings.attention, storage, self.model, repeatable)
        if config.preemption != "recompute" and states is None and not measures:
            host_blocks = HostBlocks(storage, plan_host_slots(config.swap_memory, memory))
        drafter = proposer if isinstance(proposer, Drafter) else Drafter()  # Some have no network that reads steps.
        parts: dict[str, Any] = {"structured": self.structured, "drafter": drafter}
        parts |= {"host_blocks": host_blocks, "states": states}
        if not settings.attention.capabilities.captures:
            images = None if self.images is None else ImageRunner(self.images.encoder)
            runner = EncoderRunner if getattr(self.model, "reads_whole_prompts", False) else CPURunner
            return runner(self.model, settings.attention, storage, images=images, **parts), proposer
        sizes = StepSizes(
            requests=max_requests,
            tokens=settings.max_batch_tokens,
            context=settings.max_model_len,
            drafts=self._max_drafts,
            drafts_per_request=settings.drafts_per_request,
            graphs=config.cuda_graphs,
            draft_graphs=config.draft_graphs,
            step_bytes=step_bytes,
        )
        return GPURunner(self.model, settings.attention, storage, sizes, **parts), proposer


def _measures_steps(device: torch.device) -> bool:
    """Whether a step's memory is measured before the cache takes its own."""
    return device.type == "cuda"
