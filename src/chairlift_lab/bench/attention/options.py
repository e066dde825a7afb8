"""What `chairlift bench attention` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift_lab.report.lists import number_list

_LAYER, _BATCH = "Layer", "Batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The layer and the batches; the default layer is that of the default model."""

    heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_LAYER)] = 9
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.", rich_help_panel=_LAYER)] = 3
    head_dim: Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=_LAYER)] = 64
    batches: Annotated[Sequence[int], number_list("Requests per batch.", panel=_BATCH)] = (1, 4, 16, 64)
    variations: Annotated[
        Sequence[float],
        number_list("Variation of the lengths in a batch: standard deviation / mean.", kind=float, panel=_BATCH),
    ] = (0.0, 0.5, 1.0)
    context: Annotated[int, typer.Option(help="Mean length of a sequence.", rich_help_panel=_BATCH)] = 512
    prompt: Annotated[int, typer.Option(help="Prompt tokens in a mixed batch.", rich_help_panel=_BATCH)] = 256
    tiling_sizes: Annotated[
        Sequence[int], number_list("Prompt tokens for the tiling experiment.", "--sizes", panel=_BATCH)
    ] = (512, 1024, 2048, 4096, 8192, 16384)
    cache_sizes: Annotated[
        Sequence[int], number_list("Tokens generated with and without a KV cache.", panel=_BATCH)
    ] = (32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "context", "prompt"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise InvalidParameter("kv_heads", f"must divide the {self.heads} heads, got {self.kv_heads}")
        for name in ("batches", "variations", "tiling_sizes", "cache_sizes"):
            values, least = getattr(self, name), 0 if name == "variations" else 1
            if not values or min(values) < least:
                raise InvalidParameter(name, f"must be numbers of at least {least}, got {list(values)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings(AttentionOptions):
    """The options, and sizes that the command does not offer."""

    tiling_heads: int = 2  # the score matrix of 16k tokens takes 1 GiB per head
    sharing_heads: int = 32
    sharing_group: int = 4
    sharing_batch: int = 16
