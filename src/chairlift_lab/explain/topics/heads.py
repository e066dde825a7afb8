"""Heads that share keys and values: what that saves in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from chairlift.engine.memory_plan import plan_memory
from chairlift.runner.memory import allocate_storage
from chairlift_lab.explain.drawing import HIDDEN, INK, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, TimedRequest, TopicEngines

GIB = 2**30
BLOCK_SIZE = 16
CONTEXT = 2048  # tokens of a text, for the number of texts that fit


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    kv_heads: int
    bytes_per_token: int  # measured on tensors that the engine allocated
    texts: int  # how many of CONTEXT tokens fit into a gibibyte, as the engine plans it
    own: bool  # whether it is the model's own

    @property
    def short_name(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class HeadsData:
    layers: int
    heads: int
    head_dim: int
    number_bytes: int
    variants: tuple[Variant, ...]
    tokens: int  # how many the run below had in its cache at the end
    run: Run


def run(engines: TopicEngines) -> HeadsData:
    request = TimedRequest("A", engines.prompt(20), 12)
    played = engines.record([request], block_size=BLOCK_SIZE, prefix_caching=False)
    model = engines.loaded.model
    layer = model.attention_layers[0]
    heads = layer.num_heads
    largest_divisor = next((size for size in range(heads // 2, 0, -1) if heads % size == 0), 1)
    shared = layer.num_kv_heads if 1 < layer.num_kv_heads < heads else largest_divisor
    names = {heads: "MHA: each head its own", shared: "GQA: groups share", 1: "MQA: all share one"}
    return HeadsData(
        len(model.attention_layers),
        heads,
        layer.head_dim,
        model.dtype.itemsize,
        tuple(_variant(engines, names[kv], kv, own=kv == layer.num_kv_heads) for kv in sorted(names, reverse=True)),
        max(chunk.end for step in played.steps for chunk in step.chunks),
        played,
    )


def _variant(engines: TopicEngines, name: str, kv_heads: int, *, own: bool) -> Variant:
    model = engines.loaded.model
    layers = [replace(layer, num_kv_heads=kv_heads) for layer in model.attention_layers]
    large, small = (
        plan_memory(
            layers,
            weight_bytes=0,
            kv_memory=memory,
            dtype=model.dtype,
            device=model.device,
            block_size=BLOCK_SIZE,
            max_model_len=BLOCK_SIZE,
            max_batch_requests=1,
        )
        for memory in (GIB, 64 * 2**20)
    )
    storage = allocate_storage(layers, small.num_blocks, BLOCK_SIZE, model.dtype, model.device)
    slots = storage.keys[0].shape[0] * storage.block_size
    measured = sum(tensor.nbytes for tensor in (*storage.keys, *storage.values)) // slots
    return Variant(name, kv_heads, measured, large.num_blocks // -(-CONTEXT // BLOCK_SIZE), own)


def draw(data: HeadsData) -> Sheet:
    sheet = Sheet("Query heads that share keys and values", size=(11.5, 6.8))
    grid = sheet.grid(2, 6, height_ratios=[1, 1.15])
    for index, variant in enumerate(data.variants):
        panel = sheet.panel(variant.name, grid[0, 2 * index : 2 * index + 2])
        panel.title(variant.name, "this model" if variant.own else "")
        _draw_heads(panel, data.heads, variant.kv_heads)
    sizes = {variant.short_name: variant.bytes_per_token / 1024 for variant in data.variants}
    _draw_bars(sheet.panel("bytes", grid[1, 0:3]), "KV cache of one token, KiB", sizes, "{:,.1f}")
    texts = {variant.short_name: float(variant.texts) for variant in data.variants}
    title = f"texts of {CONTEXT:,} tokens that fit into 1 GiB"
    _draw_bars(sheet.panel("texts", grid[1, 3:6]), title, texts, "{:,.0f}")
    sheet.legend({"query": "a query head: it asks", "key": "a KV head: its keys and values are kept"})
    return sheet


def _draw_heads(panel: Panel, heads: int, kv_heads: int) -> None:
    group = heads // kv_heads
    for head in range(heads):
        panel.cell(head, 0, "query", f"Q{head + 1}" if heads <= 16 else "")
        kv_centre = (head // group) * group + group / 2
        panel.axes.plot([head + 0.5, kv_centre], [1.0, 2.2], color=HIDDEN, linewidth=1)
        panel.drawn["line"] += 1
    for kv in range(kv_heads):
        panel.cell(kv * group + group / 2 - 0.5, 2.2, "key", f"KV{kv + 1}" if heads <= 16 else "", size=7)
    panel.grid_only(heads, 3.2, equal=False)


def _draw_bars(panel: Panel, title: str, values: dict[str, float], form: str) -> None:
    panel.title(title)
    bars = panel.axes.bar(list(values), list(values.values()), 0.55, color=look_of("key").fill)
    panel.drawn["bar"] += len(values)
    panel.axes.bar_label(bars, [form.format(value) for value in values.values()], color=INK, fontsize=9)
    panel.chart("", "")
    panel.axes.margins(y=0.15)
    panel.axes.tick_params(axis="x", labelsize=9, labelcolor=INK)


def own(data: HeadsData) -> Variant:
    return next((variant for variant in data.variants if variant.own), data.variants[0])


def figures(data: HeadsData) -> dict[str, Any]:
    most, mine = data.variants[0], own(data)
    sizes = [f"{each.short_name}: {each.kv_heads} KV heads, {each.bytes_per_token:,} bytes" for each in data.variants]
    return {
        "mine": mine,
        "times": most.bytes_per_token / mine.bytes_per_token,
        "mine_bytes": data.tokens * mine.bytes_per_token,
        "most_bytes": data.tokens * most.bytes_per_token,
        "sizes": "; ".join(sizes),
    }


TOPIC = Topic("heads", run, {"heads": draw}, figures)
