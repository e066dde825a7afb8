"""Attention in one head of a real layer, and heads that share keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from chairlift.attention.interface import visible_mask
from chairlift.engine.memory_plan import plan_memory
from chairlift.errors import InvalidParameter
from chairlift.layers.linear import Linear
from chairlift.models.decoder import Decoder
from chairlift.runner.memory import allocate_storage
from chairlift_lab.explain.drawing import HIDDEN, INK, Look, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import AttentionCall, Run, TimedRequest, TopicEngines

SENTENCE = "The cat sat on the mat because it was tired"
LOOKS_FROM, LOOKS_AT = "it", "cat"  # the head is chosen in which the first looks at the second the most

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionData:
    words: tuple[str, ...]
    layer: int
    head: int
    kv_head: int
    heads: int
    layers: int
    scale: float
    hidden: Matrix  # [tokens, hidden]: what the layer is given
    q: Matrix  # [tokens, head_dim], rotated by the positions
    k: Matrix
    v: Matrix
    scores: Matrix  # [tokens, tokens]: q·k·scale
    weights: Matrix  # They are taken after mask and softmax.
    output: Matrix  # [tokens, head_dim]: weights·v
    difference: float  # The engine's own kernel differs by no more for this head.
    asks: tuple[int, int]  # the row and column by which the head was chosen
    run: Run


class Attention(Topic):
    """One head, from the hidden states to the output."""

    def run(self, engines: TopicEngines) -> AttentionData:
        model = engines.loaded.model
        if not isinstance(model, Decoder):
            raise InvalidParameter("model", "this topic looks into our own decoder; choose a model that runs on it")
        tokens = tuple(engines.loaded.tokenizer.encode(SENTENCE, add_special_tokens=False))
        with _noting_inputs(model) as inputs:
            recorded, calls = engines.record_calls([TimedRequest("A", tokens, 1)], lambda call: call)
        words = tuple(engines.labels(tokens))
        asks = len(words) - 3, 1  # Other tokenizers cut other pieces.
        if LOOKS_FROM in words and LOOKS_AT in words:
            asks = words.index(LOOKS_FROM), words.index(LOOKS_AT)
        call, head = max(
            ((call, head) for call in calls for head in range(call.layer.num_heads)),
            key=lambda pair: float(_scores_and_weights(*pair)[1][asks]),
        )
        layer = call.layer
        kv_head = head // (layer.num_heads // layer.num_kv_heads)
        scores, weights = _scores_and_weights(call, head)
        output = weights @ call.v[:, kv_head]
        hidden = inputs[-len(calls) :][layer.index]  # The first ones are of a warm-up.
        tensors = {"hidden": hidden, "q": call.q[:, head], "k": call.k[:, kv_head], "v": call.v[:, kv_head]}
        tensors |= {"scores": scores, "weights": weights, "output": output}
        matrices: dict[str, Any] = {
            name: tuple(tuple(round(value, 5) for value in row) for row in tensor.tolist())
            for name, tensor in tensors.items()
        }
        return AttentionData(
            *(words, layer.index, head, kv_head, layer.num_heads, len(calls), layer.scale),
            **matrices,
            difference=float((output - call.output[:, head]).abs().max()),
            asks=asks,
            run=recorded,
        )

    def draw(self, data: AttentionData) -> Sheet:
        sheet = Sheet("attention", data=data, layer=data.layer + 1, head=data.head + 1)
        grid = sheet.grid(2, 12, height_ratios=[1, 1.35])
        size = len(data.q[0])
        titles = {
            "hidden": f"① each token is {len(data.hidden[0])} numbers",
            "q": f"② Q, its question: {size} numbers",
            "k": f"③ K, its label: {size} numbers",
            "v": f"④ V, its content: {size} numbers",
        }
        for column, (name, title) in enumerate(titles.items()):
            panel = sheet.panel(name, grid[0, 3 * column : 3 * column + 3])
            _draw_numbers(panel, title, getattr(data, name), _typical(getattr(data, name)))
            if name == "hidden":
                panel.row_names(data.words, size=8.5)
        _draw_scores(sheet.panel("scores", grid[1, 0:5]), data)
        _draw_weights(sheet.panel("weights", grid[1, 5:9]), data)
        _draw_numbers(sheet.panel("output", grid[1, 9:12]), "⑦ output: a mix of V", data.output, _typical(data.v))
        sheet.also = [
            (Look("#5d3a8c"), "a number above zero"),
            (Look("#e08214"), "a number below zero"),
            (Look("#2171b5"), "a large share of the attention"),
        ]
        return sheet

    def figures(self, data: AttentionData) -> dict[str, Any]:
        row, column = data.asks
        return {
            "layer": data.layer + 1,
            "head": data.head + 1,
            "sentence": SENTENCE,
            "looks_from": data.words[row],
            "looks_at": data.words[column],
            "share": data.weights[row][column],
            "all_heads": data.layers * data.heads,
        }


@contextmanager
def _noting_inputs(model: Decoder) -> Iterator[list[Tensor]]:
    """While it lasts, the inputs of all projections to queries, keys and values, layer by layer."""
    projections = {id(layer.attention.qkv) for layer in model.layers}
    inputs: list[Tensor] = []
    multiply = Linear.__call__

    def note(linear: Linear, x: Tensor, *others: Any, **options: Any) -> Any:
        if id(linear) in projections:
            inputs.append(x.clone())
        return multiply(linear, x, *others, **options)

    with patch.object(Linear, "__call__", note):
        yield inputs


def _scores_and_weights(call: AttentionCall, head: int) -> tuple[Tensor, Tensor]:
    group = call.layer.num_heads // call.layer.num_kv_heads
    scores = call.q[:, head] @ call.k[:, head // group].T * call.layer.scale
    mask = visible_mask(call.layer, 0, len(scores), scores.device)
    return scores, scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)


def _typical(values: Matrix) -> float:
    """A bound that most numbers keep, so that a few large ones do not fade all others."""
    flat = sorted(abs(value) for row in values for value in row)
    return flat[int(0.98 * (len(flat) - 1))] or 1.0


def _draw_numbers(panel: Panel, title: str, values: Matrix, most: float) -> None:
    panel.title(title)
    panel.heat(values, "number", most)
    panel.grid_only(len(values[0]), len(values), equal=False)


def _draw_scores(panel: Panel, data: AttentionData) -> None:
    panel.title("⑤ scores: every Q with every K")
    most = max(abs(data.scores[i][j]) for i in range(len(data.words)) for j in range(i + 1)) or 1.0
    for i, row in enumerate(data.scores):
        for j, score in enumerate(row):
            if j > i:
                panel.cell(j, i, "masked", "×")
            else:
                label = f"{score:.1f}".replace("-0.0", "0.0")
                panel.cell(j, i, "score", label, look=Look.shade("PuOr", 0.5 + 0.5 * score / most), size=7)
    _name_tokens(panel, data)
    panel.row_names(data.words, size=8.5)


def _draw_weights(panel: Panel, data: AttentionData) -> None:
    panel.title("⑥ after the mask and softmax: %")
    for i, row in enumerate(data.weights):
        for j, weight in enumerate(row[: i + 1]):
            panel.cell(j, i, "weight", f"{100 * weight:.0f}", look=Look.shade("Blues", weight), size=7)
    _name_tokens(panel, data)
    asking, asked = data.asks
    panel.frame(asked, asking, 1, 1, look_of("recomputed").fill, linewidth=2)


def _name_tokens(panel: Panel, data: AttentionData) -> None:
    panel.grid_only(len(data.words), len(data.words), equal=False)
    panel.column_names(data.words, size=8.5, rotation=40)


# ---- heads that share keys and values -------------------------------------------------------------------------------

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


class Heads(Topic):
    """What sharing saves in memory."""

    def run(self, engines: TopicEngines) -> HeadsData:
        request = TimedRequest("A", engines.prompt(20), 12)
        played = engines.record([request], block_size=BLOCK_SIZE, prefix_caching=False)
        model = engines.loaded.model
        layer = model.attention_layers[0]
        heads = layer.num_heads
        largest_divisor = next((size for size in range(heads // 2, 0, -1) if heads % size == 0), 1)
        shared = layer.num_kv_heads if 1 < layer.num_kv_heads < heads else largest_divisor
        names = {heads: "MHA: each head its own", shared: "GQA: groups share", 1: "MQA: all share one"}
        return HeadsData(
            *(len(model.attention_layers), heads, layer.head_dim, model.dtype.itemsize),
            tuple(_variant(engines, names[kv], kv, own=kv == layer.num_kv_heads) for kv in sorted(names, reverse=True)),
            max(chunk.end for step in played.steps for chunk in step.chunks),
            played,
        )

    def draw(self, data: HeadsData) -> Sheet:
        sheet = Sheet("heads")
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
        return sheet

    def figures(self, data: HeadsData) -> dict[str, Any]:
        most, mine = data.variants[0], self.own(data)
        sizes = [
            f"{each.short_name}: {each.kv_heads} KV heads, {each.bytes_per_token:,} bytes" for each in data.variants
        ]
        return {
            "mine": mine,
            "times": most.bytes_per_token / mine.bytes_per_token,
            "mine_bytes": data.tokens * mine.bytes_per_token,
            "most_bytes": data.tokens * most.bytes_per_token,
            "sizes": "; ".join(sizes),
        }

    def own(self, data: HeadsData) -> Variant:
        return next((variant for variant in data.variants if variant.own), data.variants[0])


def _variant(engines: TopicEngines, name: str, kv_heads: int, *, own: bool) -> Variant:
    model = engines.loaded.model
    layers = [replace(layer, num_kv_heads=kv_heads) for layer in model.attention_layers]
    where: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": BLOCK_SIZE, "max_batch_requests": 1}
    large, small = (
        plan_memory(layers, weight_bytes=0, kv_memory=memory, **where, **sizes).num_blocks
        for memory in (GIB, 64 * 2**20)
    )
    storage = allocate_storage(layers, small, BLOCK_SIZE, model.dtype, model.device)
    slots = storage.keys[0].shape[0] * storage.block_size
    measured = sum(tensor.nbytes for tensor in (*storage.keys, *storage.values)) // slots
    return Variant(name, kv_heads, measured, large // -(-CONTEXT // BLOCK_SIZE), own)


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
