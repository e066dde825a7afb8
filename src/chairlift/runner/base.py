"""What the runners of a CPU and a GPU have in common."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice

import torch
from torch import Tensor

from chairlift.attention.backends.base import AttentionBackend
from chairlift.attention.recurrent import StateStorage
from chairlift.attention.storage import KVStorage
from chairlift.core.executor import Executor
from chairlift.core.plan import NO_PROMPT_OUTPUTS, Chunk, PromptOutputs, TokenLogprobs
from chairlift.core.request import Request
from chairlift.core.sampling.params import PoolingKind
from chairlift.models.base import CausalLM
from chairlift.runner.images import ImageRunner
from chairlift.runner.memory import HostBlocks
from chairlift.sampling.draw import TokenMasks
from chairlift.sampling.sampler import SampledBatch, Sampler, token_logprobs
from chairlift.speculation.drafter import Drafter
from chairlift.structured.output import StructuredOutput


@dataclass(eq=False, repr=False)
class ModelRunner(Executor):
    """An executor that runs a model: plan -> tensors -> logits -> tokens.

    What lasts longer than a step (the KV tensors, each request's sampling state) is kept here; what belongs to one
    step is built from its plan.
    """

    model: CausalLM
    attention: AttentionBackend
    storage: KVStorage
    _: KW_ONLY
    structured: StructuredOutput | None = None
    drafter: Drafter = field(default_factory=Drafter)
    host_blocks: HostBlocks | None = None  # Preempted requests leave their KV blocks there.
    states: StateStorage | None = None  # those of recurrent layers, if the model has any
    images: ImageRunner | None = None  # if the model reads images

    def __post_init__(self) -> None:
        self.one_by_one = bool(getattr(self.model, "batch_invariant", False))  # whether rows are sampled one by one
        self.sampler = Sampler(self.model.vocab_size, self.model.device, one_by_one=self.one_by_one)
        self.prompt_reader = PromptReader(self.model, self.one_by_one)

    @abstractmethod
    def warm_up(self) -> None:
        """Compile and load what the first requests would wait for."""

    def capture_decodes(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decode steps of these batch sizes, or of all, where steps are captured; else do nothing."""

    def capture_missed(self) -> None:
        """Capture the steps that occurred and that a server would capture when it is idle, where steps are captured."""

    def _begin_masks(self, chunks: Sequence[Chunk]) -> Future[TokenMasks] | None:
        """Start to compute token masks, which goes on while the model runs."""
        if self.structured is None:
            return None
        return self.structured.begin_masks([chunk.request for chunk in chunks], [chunk.drafts for chunk in chunks])

    def _sample(self, chunks: Sequence[Chunk], logits: Tensor, masks: Future[TokenMasks] | None) -> SampledBatch:
        """Sample on the host from logits [S, V] float32: a row for each chunk, and for each of its drafts."""
        for chunk in chunks:
            self.sampler.follow(chunk.request)
        has_drafts = any(chunk.drafts for chunk in chunks)
        return self.sampler.sample(
            logits,
            [chunk.request.id for chunk in chunks],
            [chunk.known_end - chunk.request.num_prompt for chunk in chunks],
            masks.result() if masks else None,
            [chunk.drafts for chunk in chunks] if has_drafts else None,
            [self._drawn_from(chunk) for chunk in chunks] if has_drafts else None,
        )

    def _drawn_from(self, chunk: Chunk) -> Tensor | None:
        """The distributions that a chunk's drafts were drawn from, if they were drawn."""
        return self.drafter.sampled_from(chunk.request.id) if chunk.drafts else None

    def _warm_up_drafter(self, request: Request) -> None:
        """Compile the draft network's part, with a request that the model has just computed."""
        self.drafter.warm_up(request)
        self.drafter.forget(request.id)

    def forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        self.prompt_reader.forget(request_id)

    def close(self) -> None:
        if self.images is not None:
            self.images.close()


SCORED_AT_ONCE = 128  # rows whose logits are in memory at the same time; a vocabulary is large


@dataclass(slots=True)
class _Sum:
    """The sum of the hidden states of a prompt so far."""

    total: Tensor  # [hidden] float32
    end: int = 0  # the position after the last one added


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Computes the prompt outputs of a step from the hidden states that its chunks read."""

    model: CausalLM
    one_by_one: bool
    sums: dict[str, _Sum] = field(default_factory=dict, init=False)  # Only prompts that are not complete are listed.

    def read(self, chunks: Sequence[Chunk], hidden: Tensor) -> PromptOutputs:
        """hidden [R, hidden]: the rows of the positions `chunk.read` of all chunks, in their order."""
        reading = [chunk for chunk in chunks if chunk.read]
        if not reading:
            return NO_PROMPT_OUTPUTS
        rows = hidden.split([len(chunk.read) for chunk in reading])
        scored = [(chunk, own) for chunk, own in zip(reading, rows, strict=True) if chunk.request.scores_prompt]
        pooled = [(chunk, own) for chunk, own in zip(reading, rows, strict=True) if not chunk.request.scores_prompt]
        vectors = {chunk.request.id: self._pool(chunk, own) for chunk, own in pooled}
        return PromptOutputs(
            self._score(scored),
            {request_id: array("f", vector.tolist()) for request_id, vector in vectors.items() if vector is not None},
        )

    def forget(self, request_id: str) -> None:
        self.sums.pop(request_id, None)

    def _score(self, scored: Sequence[tuple[Chunk, Tensor]]) -> dict[str, list[TokenLogprobs]]:
        """The log-probabilities of the tokens after each position, by request id."""
        tokens, counts = list[int](), list[int]()
        for chunk, rows in scored:
            tokens += chunk.request.tokens[chunk.read.start + 1 : chunk.read.stop + 1]
            counts += [chunk.request.params.prompt_logprobs or 0] * len(rows)
        hidden = torch.cat([rows for _, rows in scored]) if scored else None
        logprobs: list[TokenLogprobs] = []
        while hidden is not None and len(logprobs) < len(tokens):
            part = slice(len(logprobs), len(logprobs) + SCORED_AT_ONCE)
            logits = self.model.logits(hidden[part]).float()
            logprobs += token_logprobs(logits, tokens[part], counts[part], one_by_one=self.one_by_one)
        in_order = iter(logprobs)
        return {chunk.request.id: list(islice(in_order, len(rows))) for chunk, rows in scored}

    def _pool(self, chunk: Chunk, rows: Tensor) -> Tensor | None:
        """The vector of a prompt that this chunk completes; None before that."""
        pooling = chunk.request.params.pooling
        assert pooling is not None
        if pooling.kind is PoolingKind.MEAN:
            pooled = self._add(chunk, rows) / chunk.end
        elif pooling.kind is PoolingKind.CLS:
            pooled = self.sums.setdefault(chunk.request.id, _Sum(rows[0].float())).total
        else:
            pooled = rows[-1].float()
        if chunk.end < chunk.request.num_prompt:
            return None
        if pooling.token_ids:
            return self.model.logits(rows[-1:])[0, list(pooling.token_ids)].float()
        if pooling.labels:
            classify: Callable[[Tensor], Tensor] = getattr(self.model, "classify")  # noqa: B009 (few models have it)
            return classify(pooled[None].to(self.model.dtype))[0].float()
        pooled = pooled[: pooling.dimensions]
        return torch.nn.functional.normalize(pooled, dim=0) if pooling.normalize else pooled

    def _add(self, chunk: Chunk, rows: Tensor) -> Tensor:
        """Add the hidden states of a chunk, except those that a step before a preemption has added."""
        known = self.sums.get(chunk.request.id)
        if known is None:
            known = self.sums[chunk.request.id] = _Sum(rows.new_zeros(rows.shape[1], dtype=torch.float32))
        assert chunk.read.start <= known.end
        new = rows[known.end - chunk.read.start :]
        if len(new):
            known.total += new.float().sum(dim=0)
            known.end = chunk.read.stop
        return known.total
