"""FlashAttention: what a tiled kernel loads, and what it never writes. The engine's own kernel, watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.explain.palette import Theme
from chairlift.explain.recording import Rider, Run, record
from chairlift.explain.sheet import Panel, Sheet
from chairlift.explain.stage import Stage
from chairlift.explain.topic import Picture, Topic

if TYPE_CHECKING:
    import numpy as np

    from chairlift.explain.listening import AttentionCall

Note = Callable[[Any], None]
TOKENS, BLOCK_SIZE = 24, 4
ROW = 18  # whose walk over the blocks is shown


@dataclass(frozen=True, slots=True)
class Stop:
    """One block of keys and values that a row has walked over: what it remembers afterwards."""

    block: int
    highest: float  # score so far
    total: float  # of exp(score - highest) so far
    error: float  # of the output that these would give, relative to the final one


@dataclass(frozen=True, slots=True)
class FlashData:
    tokens: int
    block_size: int
    head_dim: int
    layer: int
    head: int
    loads: dict[str, int]  # numbers that the kernel read, by what they are
    stores: dict[str, int]  # numbers that it wrote
    keys_read: tuple[tuple[int, ...], ...]  # [row]: positions whose key it read
    row: int
    walk: tuple[Stop, ...]
    difference: float  # between the watched kernel and the compiled one
    run: Run


class _Watched:
    """An array that notes what is read from it and written to it."""

    def __init__(self, array: np.ndarray, read: Note, write: Note) -> None:
        self.array, self.read, self.write, self.shape = array, read, write, array.shape

    def __getitem__(self, index: Any) -> Any:
        self.read(index)
        return self.array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.write(index)
        self.array[index] = value


def run(stage: Stage) -> FlashData:
    from chairlift.explain.listening import listening

    started = stage.start(block_size=BLOCK_SIZE, prefix_caching=False, max_batch_tokens=8)  # short chunks: our kernel
    model = stage.loaded.model
    middle = len(model.attention_layers) // 2
    calls: list[AttentionCall] = []

    def listen(call: AttentionCall) -> None:
        if call.layer.index == middle:
            calls.append(call)

    with listening(started, listen):
        played = record(started.engine, [Rider("A", stage.prompt(TOKENS), 1)])
    return _watch(calls, played)


def _watch(calls: list[AttentionCall], played: Run) -> FlashData:
    """Run the kernel's Python source once more on what one head of the run had, and note every access."""
    import numpy as np
    import torch

    from chairlift.kernels.paged_cpu import attend_rows

    last = calls[-1]
    layer, storage = last.layer, last.storage
    table = last.layout.tables[:1].numpy()
    q, keys, values, head, walk = max(
        (_head(calls, table[0], head) for head in range(layer.num_heads)), key=lambda found: _rises(found[-1])
    )
    place_of = {int(block): place for place, block in enumerate(table[0])}
    loads: Counter[str] = Counter()
    reads: list[set[int]] = [set() for _ in range(len(q))]
    row = 0

    def note_query(index: Any) -> None:
        nonlocal row
        row = int(index[0])
        loads["queries"] += 1

    def note_key(index: Any) -> None:
        reads[row].add(place_of[int(index[0])] * storage.block_size + int(index[1]))
        loads["keys"] += 1

    def counts(counter: Counter[str], name: str) -> Note:
        return lambda index: counter.update({name: 1})

    stores: Counter[str] = Counter(output=0, elsewhere=0)
    elsewhere = counts(stores, "elsewhere")
    out = np.zeros_like(q)
    rows = np.arange(len(q))
    attend_rows.py_func(
        _Watched(q, note_query, elsewhere),
        _Watched(keys, note_key, elsewhere),
        _Watched(values, counts(loads, "values"), elsewhere),
        table,
        rows,
        np.zeros_like(rows),
        rows + 1,
        np.float32(layer.scale),
        layer.window or 0,
        np.float32(layer.softcap or 0.0),
        _Watched(out, counts(loads, "output"), counts(stores, "output")),
    )
    compiled = torch.cat([call.output[:, head : head + 1] for call in calls]).numpy()
    return FlashData(
        tokens=len(q),
        block_size=storage.block_size,
        head_dim=layer.head_dim,
        layer=layer.index,
        head=head,
        loads=dict(loads),
        stores=dict(stores),
        keys_read=tuple(tuple(sorted(found)) for found in reads),
        row=min(ROW, len(q) - 1),
        walk=walk,
        difference=float(np.abs(out - compiled).max()),
        run=played,
    )


def _head(
    calls: list[AttentionCall], table: np.ndarray, head: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, tuple[Stop, ...]]:
    """One head of the layer: queries [T, 1, d], keys and values [blocks, slots, 1, d], and a row's walk over them."""
    import torch

    layer, storage = calls[-1].layer, calls[-1].storage
    kv_head = head // (layer.num_heads // layer.num_kv_heads)
    q = torch.cat([call.q[:, head : head + 1] for call in calls]).numpy()
    keys = storage.keys[layer.index][:, :, kv_head : kv_head + 1].numpy()
    values = storage.values[layer.index][:, :, kv_head : kv_head + 1].numpy()
    row = min(ROW, len(q) - 1)
    return q, keys, values, head, _walk(q[row, 0], keys[:, :, 0], values[:, :, 0], table, row + 1, layer.scale)


def _rises(walk: tuple[Stop, ...]) -> int:
    """How often a block brought a new highest score: the more, the more there is to see."""
    return len({stop.highest for stop in walk})


def _walk(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, length: int, scale: float
) -> tuple[Stop, ...]:
    """What is known after each block, as the kernel goes."""
    import numpy as np

    size = keys.shape[1]
    scores = np.array([keys[table[place // size], place % size] @ q * scale for place in range(length)])
    stored = np.array([values[table[place // size], place % size] for place in range(length)])
    weights = np.exp(scores - scores.max())
    final = weights @ stored / weights.sum()
    stops = []
    for block in range(-(-length // size)):
        seen = slice(0, min(length, (block + 1) * size))
        highest = scores[seen].max()
        shares = np.exp(scores[seen] - highest)
        partial = shares @ stored[seen] / shares.sum()
        error = float(np.linalg.norm(partial - final) / np.linalg.norm(final))
        stops.append(Stop(block, float(highest), float(shares.sum()), error))
    return tuple(stops)


def draw(data: FlashData, theme: Theme) -> Sheet:
    sheet = Sheet(theme, "A tiled kernel: what is loaded, what is held, what is never written", size=(11.5, 7.2))
    grid = sheet.grid(2, 2, width_ratios=[1.25, 1])
    _draw_tiles(sheet.panel("tiles", grid[:, 0]), data)
    _draw_walk(sheet.panel("walk", grid[0, 1]), data)
    _draw_traffic(sheet.panel("traffic", grid[1, 1]), data)
    sheet.legend(
        {
            "loaded": "key read, score used at once",
            "held": f"the {data.block_size} scores that exist at one moment",
            "skipped": "never loaded: it comes later",
        }
    )
    return sheet


def _draw_tiles(panel: Panel, data: FlashData) -> None:
    panel.title(
        f"layer {data.layer + 1}, head {data.head + 1}: {data.tokens} tokens, keys in blocks of {data.block_size}"
    )
    held = {place for place in data.keys_read[data.row] if place // data.block_size == len(data.walk) - 2}
    for row, read in enumerate(data.keys_read):
        found = set(read)
        for place in range(data.tokens):
            kind = "loaded" if place in found else "skipped"
            panel.cell(place, row, "held" if row == data.row and place in held else kind)
    for edge in range(data.block_size, data.tokens, data.block_size):
        panel.axes.plot([edge, edge], [0, data.tokens], color=panel.theme.ink, linewidth=0.7)
    panel.grid_only(data.tokens, data.tokens)
    panel.axes.set_xticks(
        [edge + data.block_size / 2 for edge in range(0, data.tokens, data.block_size)],
        [f"block {edge // data.block_size}" for edge in range(0, data.tokens, data.block_size)],
    )
    panel.axes.set_anchor("NW")
    panel.axes.set_yticks([data.row + 0.5], [f"row {data.row} →"], color=panel.theme.ink)
    panel.axes.set_ylabel("token that looks (query)", color=panel.theme.muted)


def _draw_walk(panel: Panel, data: FlashData) -> None:
    panel.title(f"row {data.row} after each block")
    blocks = [stop.block for stop in data.walk]
    ink = panel.theme
    panel.axes.plot(blocks, [stop.highest for stop in data.walk], "o-", color=ink.look("key").fill)
    panel.axes.plot(blocks, [stop.total for stop in data.walk], "s-", color=ink.look("own").fill)
    panel.axes.plot(blocks, [stop.error for stop in data.walk], "^-", color=ink.look("shared").fill)
    panel.drawn["stop"] += len(blocks)
    panel.chart("block", "")
    panel.axes.set_xticks(blocks)
    labels = ["highest score so far", "sum so far (softmax)", "error of the output so far"]
    panel.axes.legend(labels, frameon=False, fontsize=8, labelcolor=ink.ink)


def _draw_traffic(panel: Panel, data: FlashData) -> None:
    panel.title("numbers, for this head")
    bars = {
        "scores of the full table": data.tokens**2,
        "scores written to memory": data.stores["elsewhere"],
        "scores held at a time": data.block_size,
        "output written": data.stores["output"],
        "keys read": data.loads["keys"],
        "values read": data.loads["values"],
    }
    values = list(bars.values())
    drawn = panel.axes.barh(range(len(bars)), values, 0.6, color=panel.theme.look("loaded").fill)
    panel.drawn["bar"] += len(values)
    panel.axes.bar_label(drawn, [f" {value:,}" for value in values], color=panel.theme.ink, fontsize=8.5)
    panel.chart("", "")
    panel.axes.grid(visible=False)
    panel.axes.set_xscale("symlog")
    panel.axes.set_xticks([])
    panel.axes.set_yticks(range(len(bars)), list(bars), color=panel.theme.ink, fontsize=8.5)
    panel.axes.invert_yaxis()
    panel.axes.margins(x=0.25)


def says(data: FlashData) -> str:
    return (
        f"{data.tokens} rows over {-(-data.tokens // data.block_size)} blocks of keys: {sum(map(len, data.keys_read))} "
        f"scores are made, {data.block_size} at a time, and {data.stores['elsewhere']} are written to memory."
    )


def teach(data: FlashData) -> str:
    first, last = data.walk[0], data.walk[-1]
    return f"""
Written down as a formula, attention makes a table of scores: each token against each other one. For 24 tokens that is
nothing. For 100,000 tokens it is ten billion numbers for **each head of each layer**. Writing them to memory and
reading them again would take far longer than computing them. **FlashAttention** is the trick to never write them.

[[flash]]

The kernel walks over the keys and values in **tiles**, here the blocks of the KV cache ({data.block_size} tokens). For
each tile it computes the scores, uses them, and forgets them. At any moment only {data.block_size} scores exist.

But softmax needs the sum over **all** scores. How can it work in pieces? By keeping two numbers for each row:

- the **highest score so far**, and
- the **sum so far** of e^(score − highest).

When a tile brings a higher score, what was added up before is made smaller by the right factor. After the last tile
the result is exact. In the picture, row {data.row} starts with an output that is {first.error:.0%} off and ends at
{last.error:.0%}: nothing has to be done twice.

Tiles that only hold later tokens (grey) are not loaded at all.

These are not estimates. The engine's own CPU kernel (`attend_rows`) was run with arrays that note every access: it read
{data.loads["keys"]:,} numbers of keys and {data.loads["values"]:,} of values, wrote {data.stores["output"]:,} numbers
of output and {data.stores["elsewhere"]} others. Its result differs by at most {data.difference:.0e} from the compiled
kernel in the run.

On a GPU the same idea goes one step further: a tile of many queries is kept in fast memory too, so that each key that
is loaded serves all of them.
"""


TOPIC = Topic(
    name="flash",
    title="FlashAttention: tiles instead of a table",
    question="How can attention be exact without ever writing down its scores?",
    run=run,
    pictures=(Picture("flash", draw, says),),
    teach=teach,
    code=("chairlift/kernels/paged_cpu.py", "chairlift/kernels/triton_attention.py"),
)
