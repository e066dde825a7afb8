"""Where each layer's keys and values are: which block table it has, and which part of a block.

Layers that see the same tokens form a group. A block is memory for some layers, its planes, and each table serves as
many layers as a block has planes, so that the blocks of all groups are alike:

    layers       0 window  1 window  2 full  3 window  4 window  5 full
    tables       1         1         0       2         2         0           each of two layers, the planes of a block
    planes       0         1         0       0         1         1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.attention.interface import AttentionLayer
from chairlift.core.kv.windowed_cache import FULL, Reach
from chairlift.core.plan import NO_LIMIT

MOST_TABLES = 16  # Each takes time in every step.
MOST_UNUSED = 1 / 12  # The share of all layers' memory that unused planes of a table may take.


@dataclass(frozen=True, slots=True)
class Placement:
    """The tables and planes of a model's layers, which are in the order of their index."""

    reaches: tuple[Reach, ...]  # What each table reaches; the first of several is full.
    tables: tuple[int, ...]  # the table of each layer
    planes: tuple[int, ...]  # the plane of each layer
    shapes: tuple[AttentionLayer, ...]  # a layer for each plane, which says its shape

    @property
    def num_tables(self) -> int:
        return len(self.reaches)


def place_layers(layers: Sequence[AttentionLayer], context: int = NO_LIMIT, *, num_drafting: int = 0) -> Placement:
    """Place the layers of a model, of which the last `num_drafting` are those of a draft network, in the first table.

    `context`: the most tokens of a sequence; windows and chunks of as many tokens leave none out.
    """
    layers = sorted(layers, key=lambda layer: layer.index)
    groups: dict[Reach, list[AttentionLayer]] = {}
    for layer in layers:
        reach = Reach(layer.window, layer.chunk)
        groups.setdefault(reach if reach.most < context else FULL, []).append(layer)
    if len(groups) < 2 and not num_drafting:
        return _one_table(layers, next(iter(groups), FULL))
    full = groups.pop(FULL, [])[::-1]  # those of a draft network come first
    num_planes = _num_planes(len(full), [len(group) for group in groups.values()])
    alike = len({(layer.num_kv_heads, layer.head_dim, layer.latent_dim) for layer in layers}) == 1
    drafts_fit = all(layer in full[:num_planes] for layer in layers[len(layers) - num_drafting :])
    if not full or not alike or not num_planes or not drafts_fit:
        return _one_table(layers, FULL)
    reaches: list[Reach] = []
    places: dict[int, tuple[int, int]] = {}  # The table and the plane of each layer, by index.
    for reach, group in ((FULL, full), *groups.items()):
        for first in range(0, len(group), num_planes):
            places |= {
                layer.index: (len(reaches), plane) for plane, layer in enumerate(group[first : first + num_planes])
            }
            reaches.append(reach)
    tables, planes = zip(*(places[layer.index] for layer in layers), strict=True)
    return Placement(tuple(reaches), tables, planes, tuple(layers[:num_planes]))


def _one_table(layers: Sequence[AttentionLayer], reach: Reach) -> Placement:
    return Placement((reach,), (0,) * len(layers), tuple(range(len(layers))), tuple(layers))


def _num_planes(num_full: int, others: Sequence[int]) -> int:
    """The most planes with which few are left unused; 0 if there would be too many tables."""
    counts = [num_full, *others]
    for planes in range(min(counts), 0, -1):
        tables = sum(-(-count // planes) for count in counts)
        if tables > MOST_TABLES:
            return 0
        if tables * planes - sum(counts) <= MOST_UNUSED * sum(counts):
            return planes
    return 0
