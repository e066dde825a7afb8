"""A runner with its KV cache: how much memory that gets depends on what the runner's steps take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chairlift.attention import AttentionBackend, AttentionLayer, PagedGPUAttention
from chairlift.config import EngineConfig
from chairlift.engine.kv_dtype import kv_dtype
from chairlift.engine.machine_defaults import batch_requests, batch_tokens
from chairlift.errors import InvalidParameter
from chairlift.models.base import CausalLM
from chairlift.runner.cpu import ModelRunner
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.memory import MemoryPlan, allocate_storage, plan_memory
from chairlift.speculation.draft_model import Draft
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.structured.output import StructuredOutput

MOST_DRAFTS_ON_GPU = 256  # of a step: beyond some hundred rows, arithmetic takes what a guess is to save


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """What a runner is made of, but for its cache."""

    model: CausalLM
    attention: AttentionBackend
    config: EngineConfig
    max_model_len: int
    structured: StructuredOutput
    draft: Draft | None

    def make(self) -> tuple[ModelRunner | GPURunner, MemoryPlan, int]:
        """And its seats."""
        attention, device = self.attention, self.model.device
        memory, seats = self._plan()
        if not isinstance(attention, PagedGPUAttention):
            return self._runner(memory, seats), memory, seats
        # Its steps need memory too, the more the more seats there are.
        attention.reserve(self._layers, seats + self._max_drafts, device)
        step_bytes = self._rehearse(memory, seats) if _rehearses(device) else 0
        memory, left = self._plan(step_bytes)
        seats = min(seats, left)
        return self._runner(memory, seats, step_bytes), memory, seats

    @property
    def _layers(self) -> tuple[AttentionLayer, ...]:
        return (*self.model.attention_layers, *(self.draft.layers if self.draft else ()))

    @property
    def _max_drafts(self) -> int:
        """Of a step on a GPU."""
        return 0 if self.draft is None else min(MOST_DRAFTS_ON_GPU, batch_tokens(self.config))

    def _plan(self, step_bytes: int = 0) -> tuple[MemoryPlan, int]:
        config = self.config
        memory = plan_memory(
            self._layers,
            weight_bytes=self.model.num_weight_bytes() + (self.draft.weight_bytes if self.draft else 0),
            kv_memory=config.kv_memory,
            memory_share=config.memory_share,
            dtype=kv_dtype(config, self.model),
            device=self.model.device,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            max_batch_requests=batch_requests(config),
            step_bytes=step_bytes,
        )
        return memory, config.max_batch_requests or memory.seats(batch_requests(config))

    def _rehearse(self, memory: MemoryPlan, seats: int) -> int:
        """Bytes of the largest step, which is computed with a cache of one block, and shown to what guesses."""
        runner = self._runner(replace(memory, num_blocks=1), seats)
        assert isinstance(runner, GPURunner)
        if self.draft is not None:
            proposer = self.draft.make_proposer(self.attention, runner.storage, self.model, repeatable=True)
            runner.drafter = proposer if isinstance(proposer, NetworkProposer) else None
        try:
            return runner.rehearse()
        except torch.OutOfMemoryError:
            problem = "a step of so many tokens takes more memory than the weights leave; lower it"
            raise InvalidParameter("max_batch_tokens", problem) from None

    def _runner(self, memory: MemoryPlan, seats: int, step_bytes: int = 0) -> ModelRunner | GPURunner:
        model, config = self.model, self.config
        storage = allocate_storage(self._layers, memory, kv_dtype(config, model), model.device)
        if not isinstance(self.attention, PagedGPUAttention):
            return ModelRunner(model, self.attention, storage, self.structured)
        return GPURunner(
            model,
            self.attention,
            storage,
            seats=seats,
            max_batch_tokens=batch_tokens(config),
            max_model_len=self.max_model_len,
            graphs=config.cuda_graphs,
            structured=self.structured,
            max_drafts=self._max_drafts,
            draft_layers=self.draft.layers if self.draft else (),
            step_bytes=step_bytes,
        )


def _rehearses(device: torch.device) -> bool:
    """Whether a step's memory is measured before the cache takes its own."""
    return device.type == "cuda"
