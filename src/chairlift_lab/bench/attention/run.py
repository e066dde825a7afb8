"""The experiments of `chairlift bench attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from chairlift.progress import Note
from chairlift_lab.bench.attention.kernels import SharingPoint, TilingPoint, compare_head_sharing, compare_tiling
from chairlift_lab.bench.attention.kv_recompute import RecomputePoint, compare_recompute
from chairlift_lab.bench.attention.modes import AttentionShape, ModesPoint, compare_modes
from chairlift_lab.bench.attention.options import AttentionSettings

EXPERIMENTS = ("modes", "tiling", "sharing", "cache")


@dataclass(slots=True)
class AttentionResults:
    """The points of each experiment; empty for those that were not run."""

    modes: list[ModesPoint] = field(default_factory=list)
    tiling: list[TilingPoint] = field(default_factory=list)
    sharing: list[SharingPoint] = field(default_factory=list)
    cache: list[RecomputePoint] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the JSON report."""
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
    shape = AttentionShape(settings.heads, settings.kv_heads, settings.head_dim, device, dtype)
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
        plain = AttentionShape(settings.tiling_heads, settings.tiling_heads, settings.head_dim, device, dtype)
        results.tiling = compare_tiling(plain, sizes=settings.tiling_sizes, note=note)
    if "sharing" in experiments:
        wide = AttentionShape(settings.sharing_heads, settings.sharing_heads, settings.head_dim, device, dtype)
        results.sharing = compare_head_sharing(
            wide, group=settings.sharing_group, batch=settings.sharing_batch, context=settings.context, note=note
        )
    if "cache" in experiments:
        results.cache = compare_recompute(device, dtype, sizes=settings.cache_sizes, note=note)
    return results
