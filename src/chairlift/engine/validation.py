"""Everything that can be wrong with a request, checked before it is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.beam import BeamSearch
from chairlift.core.executor import ExecutorCapabilities
from chairlift.core.images import PromptImage
from chairlift.core.request import RequestLimits
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import InvalidParameter
from chairlift.structured.output import StructuredOutput


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Checks requests against what the model, the KV cache and the executor of one engine can do."""

    limits: RequestLimits
    scheduler: Scheduler
    structured: StructuredOutput | None
    eos_ids: frozenset[int]
    capabilities: ExecutorCapabilities
    generates: bool  # whether the model has a language-model head

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        timeout: float | None,
        priority: int,
        targets: Targets = NO_TARGETS,
        images: Sequence[PromptImage] = (),
    ) -> int:
        """Raise InvalidParameter if this cannot be served; return how many tokens it may generate."""
        self.limits.check_prompt_length(len(prompt), prompt_only=params.max_tokens == 0)
        self.limits.check_tokens("prompt", prompt)
        self.limits.check_params(params)
        if params.structure is not None:
            self.structures(params.structure).check(params.structure)
        reasoning = self.structured.reasoning_format if self.structured else None
        if params.thinking_token_budget is not None and reasoning is None:
            raise InvalidParameter("thinking_token_budget", "this model has no reasoning that could be limited")
        self._check_prompt_outputs(params)
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
        self._check_priority(priority)
        if targets.given and not (self.scheduler.ordering.uses_targets or self.scheduler.budget.uses_targets):
            problem = f"have no effect with order {self.scheduler.ordering.name!r}"
            raise InvalidParameter("targets", f"{problem}; start with order 'slack' or 'edf', or budget 'slack'")
        self._check_images(len(prompt), images)
        max_new_tokens = self._max_new_tokens(len(prompt), params)
        if params.beam_width is not None:
            self._check_beams(params)
        return max_new_tokens

    def _check_images(self, num_prompt: int, images: Sequence[PromptImage]) -> None:
        if not images:
            return
        cache = self.scheduler.images
        if cache is None:
            raise InvalidParameter("images", "this model reads text only")
        for image in images:
            if not 0 <= image.start < image.end <= num_prompt:
                raise InvalidParameter("images", f"one is at [{image.start}, {image.end}) of {num_prompt} tokens")
            if image.rows > cache.capacity:
                problem = f"one has {image.rows} tokens, and there is room for {cache.capacity} (image_memory)"
                raise InvalidParameter("images", f"{problem}; make it smaller")

    def structures(self, structure: Structure) -> StructuredOutput:
        """What compiles and enforces `structure`; raises if the engine has no such thing."""
        if self.structured is None:
            raise InvalidParameter(structure.parameter, "this engine has no structured output")
        return self.structured

    def _max_new_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """`max_tokens`, or as many as the context and, without `max_tokens`, the KV cache have room for."""
        beams = params.beam_width or 1
        room = self.limits.max_model_len - num_prompt
        if params.max_tokens is None:
            room = min(room, max(1, self.scheduler.most_new_tokens(num_prompt, beams)))
        if params.min_tokens > room:
            problem = f"{params.min_tokens} exceeds the {room} tokens that the prompt leaves of the context"
            raise InvalidParameter("min_tokens", problem)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.scheduler.check_fits(num_prompt, max_new_tokens, beams)
        return max_new_tokens

    def _check_prompt_outputs(self, params: SamplingParams) -> None:
        pooling, hidden_size = params.pooling, self.capabilities.hidden_size
        if not self.generates and (pooling is None or pooling.token_ids):
            raise InvalidParameter("model", "has no language-model head: it only makes embeddings")
        for name in ("prompt_logprobs", "pooling"):
            if getattr(params, name) is not None and not hidden_size:
                raise InvalidParameter(name, "this executor returns nothing about prompts")
        if pooling is None:
            return
        if pooling.labels and not self.capabilities.labels:
            raise InvalidParameter("pooling", "this model has no classifier's head")
        self.limits.check_tokens("pooling", pooling.token_ids)
        if (pooling.dimensions or 0) > hidden_size:
            problem = f"must be at most {hidden_size}, the size of the model's embeddings"
            raise InvalidParameter("dimensions", f"{problem}, got {pooling.dimensions}")

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise InvalidParameter("priority", f"must be an integer, got {priority!r:.40}")
        ordering = self.scheduler.ordering
        if priority and not ordering.uses_priority:
            raise InvalidParameter("priority", f"has no effect in the order {ordering.name!r}; start with 'priority'")

    def _check_beams(self, params: SamplingParams) -> None:
        if not self.capabilities.beam_search:
            raise InvalidParameter("beam_width", "is not supported on this device")
        needed = BeamSearch(params, self.eos_ids, max_new_tokens=1).num_candidates
        if needed > self.limits.vocab_size:
            problem = f"a search of this width compares {needed} tokens, but there are {self.limits.vocab_size}"
            raise InvalidParameter("beam_width", problem)
