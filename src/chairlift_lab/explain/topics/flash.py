"""FlashAttention: what a tiled kernel loads, and what it never writes. The engine's own tiles, in slow motion."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from chairlift.errors import InvalidParameter
from chairlift.kernels.cpu.attention import KEYS
from chairlift.kernels.cpu.simd import F32_ROWS
from chairlift_lab.explain.drawing import INK, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import AttentionCall, Run, TimedRequest, TopicEngines

TOKENS = 252
ROW = 230  # Its walk over the tiles is shown.


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """Scores of some tokens against some keys: made, used and forgotten."""

    first: int  # token
    last: int
    keys: int  # the first key
    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """What a row remembers after one more tile of keys and values."""

    highest: float  # score so far
    total: float  # the sum of exp(score - highest) so far
    error: float  # the relative error of the output that these would give


@dataclass(frozen=True, slots=True)
class FlashData:
    tokens: int
    heads: int  # query heads that share the keys of this KV head
    head_dim: int
    layer: int
    kv_head: int
    tile_rows: int  # the size of a tile of scores
    tile_keys: int
    made: tuple[ScoreTile, ...]
    skipped: tuple[ScoreTile, ...]  # all of it lies in the future
    loads: dict[str, int]  # numbers that were read, by what they are
    stores: dict[str, int]  # numbers that were written
    row: int
    walk: tuple[Stop, ...]
    difference: float  # The slow motion differs by this from what the compiled kernel had in the run.
    run: Run

    @property
    def table_size(self) -> int:
        """Scores that would be written if they all were."""
        return self.heads * self.tokens**2

    @property
    def written_besides(self) -> int:
        """Numbers that went to memory and are no output: among them would be the scores."""
        return sum(count for name, count in self.stores.items() if name != "output")


class Flash(Topic):
    """One layer of one run, tile by tile."""

    def run(self, engines: TopicEngines) -> FlashData:
        middle = len(engines.loaded.model.attention_layers) // 2
        request = TimedRequest("A", (*engines.prompt(TOKENS - 102), *engines.prompt(102, skip=3)), 1)
        options: dict[str, Any] = {"max_batch_tokens": TOKENS, "attention": "ragged"}
        played, (call, *_) = engines.record_calls([request], lambda call: call, layer=middle, **options)
        if call.layer.window is not None or call.layer.softcap is not None:
            raise InvalidParameter("model", "this topic needs a layer with plain attention in the middle of the model")
        # The more often a tile brings a new highest score, the more there is to see.
        walks = (_watch(call, kv_head, played) for kv_head in range(call.layer.num_kv_heads))
        return max(walks, key=lambda data: len({stop.highest for stop in data.walk}))

    def draw(self, data: FlashData) -> Sheet:
        sheet = Sheet("flash", data=data)
        grid = sheet.grid(2, 2, width_ratios=[1.25, 1])
        _draw_tiles(sheet.panel("tiles", grid[:, 0]), data)
        _draw_walk(sheet.panel("walk", grid[0, 1]), data)
        _draw_traffic(sheet.panel("traffic", grid[1, 1]), data)
        return sheet

    def figures(self, data: FlashData) -> dict[str, Any]:
        first, last = data.walk[0], data.walk[-1]
        return {"table": data.table_size, "first": first, "last": last, "written": data.written_besides}


class _Watched:
    """An array that notes how many numbers are read from it and written to it."""

    def __init__(self, array: np.ndarray, name: str, loads: Counter[str], stores: Counter[str]) -> None:
        self.array, self.name, self.loads, self.stores = array, name, loads, stores

    def __getitem__(self, index: Any) -> np.ndarray:
        numbers: np.ndarray = self.array[index]
        self.loads[self.name] += numbers.size
        return numbers

    def __setitem__(self, index: Any, values: np.ndarray) -> None:
        self.stores[self.name] += values.size
        self.array[index] = values


def _watch(call: AttentionCall, kv_head: int, played: Run) -> FlashData:
    """Go through the tiles that the engine's kernel was given in the run, one by one."""
    layer, storage = call.layer, call.storage
    group = layer.num_heads // layer.num_kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    table = call.layout.tables[0].long()
    blocks = (side[layer.index][table][:, :, kv_head].flatten(0, 1).numpy() for side in (storage.keys, storage.values))
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter(output=0, queries=0, keys=0, values=0)
    q = call.q[:, heads].numpy()
    arrays = zip(("keys", "values", "queries", "output"), (*blocks, q, np.zeros_like(q)), strict=True)
    keys, values, queries, out = (_Watched(array, name, loads, stores) for name, array in arrays)
    work = call.attention.work(layer)
    assert work is not None
    made, skipped, walk = list[ScoreTile](), list[ScoreTile](), list[Stop]()
    row = min(ROW, len(q) - 1)
    final = call.output[row, heads.start].numpy()
    tiles = work.pieces.tiles
    for first_row, tokens, position in zip(tiles.rows, tiles.counts, tiles.positions, strict=True):
        own_rows = slice(first_row, first_row + tokens)
        state = _Rows(queries[own_rows] * layer.scale)
        end = int(position + tokens)  # the kernel goes no further; what lies behind is the future of all its rows
        for base in range(0, len(q), KEYS):
            count = min(KEYS, end - base) if base < end else min(KEYS, len(q) - base)
            if base < end:
                key_tile, value_tile = keys[base : base + count], values[base : base + count]
            for first in range(0, tokens * group, F32_ROWS):
                last = min(first + F32_ROWS, tokens * group)
                tile = ScoreTile(int(position + first // group), int(position + (last - 1) // group), base, count)
                if base > tile.last:
                    skipped.append(tile)
                else:
                    made.append(tile)
                    rows = np.arange(first, last)
                    state.take(rows, position + rows // group - base, key_tile, value_tile)
            if first_row <= row < first_row + tokens and base <= row:
                walk.append(state.stop((row - first_row) * group, final))
        out[own_rows] = state.output().reshape(tokens, group, -1)
    difference = float(np.abs(out.array - call.output[:, heads].numpy()).max())
    return FlashData(
        *(len(q), group, layer.head_dim, layer.index, kv_head, F32_ROWS, KEYS, tuple(made), tuple(skipped)),
        *(dict(loads), dict(stores), row, tuple(walk), difference, played),
    )


class _Rows:
    """The rows of a tile of queries, one per token and head, and what they remember from tile to tile."""

    def __init__(self, queries: np.ndarray) -> None:
        self.queries = queries.reshape(-1, queries.shape[-1])
        self.sums = np.zeros_like(self.queries)
        self.highest = np.full(len(self.queries), -np.inf)
        self.totals = np.zeros(len(self.queries))

    def take(self, rows: np.ndarray, lasts: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """One tile of scores: add what it says, and let what was added before shrink with a new highest score.

        `lasts`: the last of the keys that each row sees.
        """
        scores = np.where(np.arange(len(keys)) <= lasts[:, None], self.queries[rows] @ keys.T, -np.inf)
        highest = np.maximum(self.highest[rows], scores.max(axis=1))
        weights, shrink = np.exp(scores - highest[:, None]), np.exp(self.highest[rows] - highest)
        self.highest[rows] = highest
        self.totals[rows] = self.totals[rows] * shrink + weights.sum(axis=1)
        self.sums[rows] = self.sums[rows] * shrink[:, None] + weights @ values

    def output(self) -> Any:
        return self.sums / self.totals[:, None]

    def stop(self, row: int, final: np.ndarray) -> Stop:
        error = np.linalg.norm(self.sums[row] / self.totals[row] - final) / np.linalg.norm(final)
        return Stop(float(self.highest[row]), float(self.totals[row]), float(error))


def _draw_tiles(panel: Panel, data: FlashData) -> None:
    panel.title(f"layer {data.layer + 1}, KV head {data.kv_head + 1}: {data.tokens} tokens in tiles")
    held = next(tile for tile in reversed(data.made) if tile.first <= data.row <= tile.last)
    kinds = [("loaded", tile) for tile in data.made if tile is not held]
    for kind, tile in [*kinds, *(("skipped", tile) for tile in data.skipped), ("held", held)]:
        # Tiles overlap a little: they are too many to be told apart.
        panel.cell(tile.keys, tile.first, kind, width=tile.count, height=tile.last - tile.first + 1, gap=-0.4)
    edges = [*range(0, data.tokens, data.tile_keys), data.tokens]
    for edge in edges[1:-1]:
        panel.axes.plot([edge, edge], [0, data.tokens], color=INK, linewidth=0.7)
        panel.axes.plot([0, data.tokens], [edge, edge], color=INK, linewidth=0.7)
    panel.grid_only(data.tokens, data.tokens)
    panel.axes.set_anchor("NW")
    panel.axes.set_xticks(edges, [str(edge) for edge in edges])
    panel.axes.set_yticks([data.row], [f"row {data.row} →"], color=INK)
    panel.axis_names("token that is seen (key)", "token that looks (query)")


def _draw_walk(panel: Panel, data: FlashData) -> None:
    panel.title(f"row {data.row} after each tile of keys")
    tiles = list(range(1, len(data.walk) + 1))
    for name, marker, kind in (("highest", "o-", "key"), ("total", "s-", "own"), ("error", "^-", "shared")):
        panel.axes.plot(tiles, [getattr(stop, name) for stop in data.walk], marker, color=look_of(kind).fill)
    panel.drawn["stop"] += len(tiles)
    panel.chart("tiles read", "")
    panel.axes.set_xticks(tiles)
    labels = ["highest score so far", "sum so far (softmax)", "error of the output so far"]
    panel.axes.legend(labels, frameon=False, fontsize=8, labelcolor=INK)


def _draw_traffic(panel: Panel, data: FlashData) -> None:
    panel.title(f"numbers, for {data.heads} query heads and their KV head")
    bars = {
        "scores of the full table": data.table_size,
        "scores written to memory": data.written_besides,
        "scores held at a time": data.tile_rows * data.tile_keys,
        "keys read": data.loads["keys"],
        "values read": data.loads["values"],
        "output written": data.stores["output"],
    }
    panel.drawn["bar"] += len(bars)
    panel.chart("", "")
    panel.axes.set_xticks([])
    panel.measures(bars, " {:,}", look_of("loaded").fill, size=8.5)
