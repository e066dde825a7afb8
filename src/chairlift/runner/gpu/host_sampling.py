"""Rows of a GPU step that the host samples: grammars, penalties, biases, bans, logprobs, and drafts that were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.storage import sent
from chairlift.core.plan import Chunk
from chairlift.runner.gpu.packing import PackedStep
from chairlift.runner.gpu.slots import Slots
from chairlift.runner.gpu.step import SampledTokens
from chairlift.sampling.sampler import Sampler
from chairlift.speculation.draft_network import ModelProposer
from chairlift.structured.output import MaskJob, StructuredOutput


class HostSampling:
    """Samples those rows again on the host and writes the tokens back to the device."""

    def __init__(
        self,
        slots: Slots,
        sampler: Sampler,
        last_token: Tensor,
        structured: StructuredOutput | None,
        drafter: ModelProposer | None,
    ) -> None:
        """`last_token` [slots + 1] int32: each request's last token, on the device."""
        self._slots = slots
        self._sampler = sampler
        self._last_token = last_token
        self._structured = structured
        self._drafter = drafter

    def rows(self, packed: PackedStep) -> list[int]:
        """The chunks to sample on the host, as indices among those that sample."""
        wanted = self._slots.on_host[packed.slots]
        if self._drafter is not None:
            wanted |= np.array([self._drawn_from(chunk) is not None for chunk in packed.chunks], np.bool_)
        found: list[int] = wanted.nonzero()[0].tolist()
        return found

    def begin_masks(self, packed: PackedStep, rows: Sequence[int]) -> MaskJob | None:
        """Start computing token masks, which goes on while the device computes the logits."""
        if self._structured is None:
            return None
        chunks = [packed.chunks[index] for index in rows]
        return self._structured.begin_masks([chunk.request for chunk in chunks], [chunk.drafts for chunk in chunks])

    def sample(
        self, packed: PackedStep, rows: Sequence[int], logits: Tensor, masks: MaskJob | None
    ) -> dict[int, SampledTokens]:
        """The tokens of these chunks, by index; also set as their last tokens on the device."""
        if not rows:
            return {}
        chunks = [packed.chunks[index] for index in rows]
        for chunk in chunks:
            self._sampler.follow(chunk.request)
        ends = np.cumsum([chunk.num_scored for chunk in packed.chunks])[rows].tolist()
        scored = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_scored, end)]
        sampled = self._sampler.sample(
            logits[sent(scored, logits.device)].float(),
            [chunk.request.id for chunk in chunks],
            [chunk.known_end - chunk.request.num_prompt for chunk in chunks],
            masks.wait() if masks else None,
            [chunk.drafts for chunk in chunks],
            [self._drawn_from(chunk) for chunk in chunks],
        )
        found, at = [], 0
        for accepted in sampled.accepted:
            kept = slice(at, at + 1 + accepted)
            found.append(SampledTokens(sampled.tokens[kept], sampled.logprobs[kept]))
            at = kept.stop
        slots = sent(packed.slots[rows].tolist(), logits.device)
        self._last_token[slots] = sent([one.tokens[-1] for one in found], logits.device, torch.int32)
        return dict(zip(rows, found, strict=True))

    def _drawn_from(self, chunk: Chunk) -> Tensor | None:
        return self._drafter.sampled_from(chunk.request.id) if self._drafter is not None and chunk.drafts else None
