"""What a runner does for images: encodes them slice by slice, and puts their embeddings into batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from chairlift.attention.batch import Embeddings, MutualSpan, PromptPositions, StepBatch
from chairlift.attention.interface import StepAttention
from chairlift.attention.mutual import MutualAttention
from chairlift.attention.storage import KVStorage
from chairlift.core.images import EncodePlan, ImageWork, image_key
from chairlift.core.plan import StepPlan
from chairlift.vision.encoder import EncodedImage, VisionEncoder
from chairlift.vision.slices import SlicedWork


@dataclass(frozen=True, slots=True)
class ImageRunner:
    """Holds what was encoded for as long as the scheduler's cache says."""

    encoder: VisionEncoder
    encoded: dict[bytes, EncodedImage] = field(default_factory=dict)
    begun: dict[bytes, SlicedWork[EncodedImage]] = field(default_factory=dict)
    bad: dict[bytes, str] = field(default_factory=dict)  # why images of the last step could not be encoded

    def encode(self, plan: EncodePlan) -> float:
        """Do the work of a step; return the seconds that it took."""
        start = time.perf_counter()
        self.bad.clear()
        for key in plan.drops:
            self.encoded.pop(key, None)
            begun = self.begun.pop(key, None)
            if begun is not None:
                begun.cancel()
        whole = [work for work in plan.works if work.share >= 1 and self._is_new(work)]
        if whole:
            self._encode_together(whole)
        for work in plan.works:
            if work.key not in self.encoded and work.key not in self.bad:
                self._advance(work)
        return time.perf_counter() - start if plan.works else 0.0

    def _encode_together(self, works: Sequence[ImageWork]) -> None:
        try:
            images = self.encoder.encode([work.image for work in works])
            self.encoded.update(zip((work.key for work in works), images, strict=True))
        except Exception as error:  # The modules of other families may raise anything for an image.
            if len(works) == 1:
                self.bad[works[0].key] = f"an image cannot be encoded: {error}"
                return
            for work in works:  # One bad image ends no request but its own.
                self._encode_together([work])

    def _is_new(self, work: ImageWork) -> bool:
        return work.key not in self.encoded and work.key not in self.begun

    def _advance(self, work: ImageWork) -> None:
        if work.key not in self.begun:
            self.begun[work.key] = self.encoder.begin(work.image)
        try:
            encoded = self.begun[work.key].advance(work.share)
        except Exception as error:
            del self.begun[work.key]
            self.bad[work.key] = f"an image cannot be encoded: {error}"
            return
        if encoded is not None:
            self.encoded[work.key] = encoded
            del self.begun[work.key]

    def close(self) -> None:
        """Give up what has been begun, whose threads would keep the encoder alive."""
        for work in self.begun.values():
            work.cancel()
        self.begun.clear()

    def place(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """The batch of a plan with the embeddings of the images in its chunks, and where their tokens stand."""
        if not any(chunk.request.images for chunk in plan.chunks):
            return batch
        rows, vectors, deep = list[Tensor](), list[Tensor](), list[tuple[Tensor, ...]]()
        mutual = list[MutualSpan]()
        for index, chunk in enumerate(plan.chunks):
            first = batch.layout.offsets[index] - chunk.start
            for image in chunk.request.images:
                pieces = image.pieces(chunk.start, chunk.end)
                if not pieces:
                    continue
                encoded = self.encoded.get(image_key(chunk.request.salt, image))
                if encoded is None:  # It could not be encoded, and its request ends with this step.
                    assert self.bad
                    continue
                for position, row, count in pieces:
                    rows.append(torch.arange(first + position, first + position + count))
                    vectors.append(encoded.rows[row : row + count])
                    deep.append(tuple(layer[row : row + count] for layer in encoded.deep))
                    if image.whole:
                        mutual.append(MutualSpan(index, position, position + count, image.end))
        rotary = self._rotary_positions(plan, batch)
        if not rows:
            return replace(batch, rotary_positions=rotary)
        embeddings = Embeddings(
            torch.cat(rows).to(batch.tokens.device),
            torch.cat(vectors),
            [torch.cat(layer) for layer in zip(*deep, strict=True)],
        )
        return replace(batch, embeddings=embeddings, rotary_positions=rotary, mutual=mutual)

    def _rotary_positions(self, plan: StepPlan, batch: StepBatch) -> Tensor | None:
        axes = self.encoder.axes
        if axes is None:
            return None
        positions = batch.positions.cpu().numpy()[:, None].repeat(len(axes), axis=1)
        for index, chunk in enumerate(plan.chunks):
            own = chunk.request.rotary_positions
            if isinstance(own, PromptPositions):
                first = batch.layout.offsets[index]
                positions[first : first + chunk.count] = own.rows(chunk.start, chunk.end)
        return torch.from_numpy(np.ascontiguousarray(positions)).to(batch.positions.device)

    def attention(self, attention: StepAttention, batch: StepBatch, storage: KVStorage) -> StepAttention:
        """The attention of a step, where tokens of images may see each other."""
        if not batch.mutual:
            return attention
        return MutualAttention(attention, batch, storage, self.encoder.mutual_in_windows_only)
