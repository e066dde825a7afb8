"""`chairlift bench attention`: every comparison of attention, as rows for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from chairlift.errors import InvalidParameter
from chairlift.lab.bench.attention.kernels import SharingPoint, TilingPoint, compare_head_sharing, compare_tiling
from chairlift.lab.bench.attention.kv_recompute import RecomputePoint, compare_recompute
from chairlift.lab.bench.attention.modes import ModesPoint, Shape, compare_modes
from chairlift.lab.common.timing import Note

EXPERIMENTS = ("modes", "tiling", "sharing", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """What to measure. The shape of the layer is that of the default model."""

    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    batches: Sequence[int] = (1, 4, 16, 64)
    variations: Sequence[float] = (0.0, 0.5, 1.0)  # of the lengths in a batch: standard deviation / mean
    context: int = 512  # mean length of the sequences of a batch
    prompt: int = 256  # tokens of the prompt in a mixed batch
    tiling_sizes: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
    tiling_heads: int = 2  # the full score matrix of 16k tokens takes a GiB per head
    sharing_heads: int = 32
    sharing_group: int = 4
    sharing_batch: int = 16
    cache_sizes: Sequence[int] = (32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "context", "prompt", "tiling_heads"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidParameter("kv_heads", f"must divide the {self.heads} heads, got {self.kv_heads}")
        for name in ("batches", "variations", "tiling_sizes", "cache_sizes"):
            values = getattr(self, name)
            if not values or min(values) < (0 if name == "variations" else 1):
                raise InvalidParameter(name, f"needs numbers that are large enough, got {list(values)}")


@dataclass(slots=True)
class AttentionResults:
    """What was measured; empty where it was left out."""

    modes: list[ModesPoint] = field(default_factory=list)
    tiling: list[TilingPoint] = field(default_factory=list)
    sharing: list[SharingPoint] = field(default_factory=list)
    cache: list[RecomputePoint] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """For the JSON report: each names its experiment and what sets it apart within."""
        return [
            *(
                _row("modes", f"{point.kind}, {point.batch} requests, variation {point.variation:g}", point)
                for point in self.modes
            ),
            *(_row("tiling", f"{point.tokens} tokens", point) for point in self.tiling),
            *(_row("sharing", point.name, point) for point in self.sharing),
            *(_row("cache", f"{point.tokens} tokens", point) for point in self.cache),
        ]


def _row(experiment: str, name: str, point: Any) -> dict[str, Any]:
    values: Mapping[str, Any] = asdict(point)
    return {"experiment": experiment} | dict(values) | {"name": f"{experiment}: {name}"}


@torch.inference_mode()
def run_attention(
    settings: AttentionSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    experiments: Sequence[str] = EXPERIMENTS,
    note: Note = lambda text: None,
) -> AttentionResults:
    shape = Shape(settings.heads, settings.kv_heads, settings.head_dim, device, dtype)
    results = AttentionResults()
    if "modes" in experiments:
        results.modes = compare_modes(
            shape,
            batches=settings.batches,
            variations=settings.variations,
            context=settings.context,
            prompt=settings.prompt,
            note=note,
        )
    if "tiling" in experiments:
        plain = Shape(settings.tiling_heads, settings.tiling_heads, settings.head_dim, device, dtype)
        results.tiling = compare_tiling(plain, sizes=settings.tiling_sizes, note=note)
    if "sharing" in experiments:
        wide = Shape(settings.sharing_heads, settings.sharing_heads, settings.head_dim, device, dtype)
        results.sharing = compare_head_sharing(
            wide, group=settings.sharing_group, batch=settings.sharing_batch, context=settings.context, note=note
        )
    if "cache" in experiments:
        results.cache = compare_recompute(device, dtype, sizes=settings.cache_sizes, note=note)
    return results


def parse_experiments(text: str) -> list[str]:
    """ "tiling, cache" -> those, each known and named once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in EXPERIMENTS or names.count(name) > 1:
            raise InvalidParameter(
                "experiments", f"{name!r} is no choice here; name {', '.join(EXPERIMENTS)} once each"
            )
    return names
