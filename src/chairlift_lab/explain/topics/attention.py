"""Attention in one head of a real layer, from the hidden states to the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from chairlift.attention.interface import visible_mask
from chairlift.errors import InvalidParameter
from chairlift.layers.linear import Linear
from chairlift.models.decoder import Decoder
from chairlift_lab.explain.drawing import INK, PALE_INK, Look, Panel, Sheet, look_of
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


def run(engines: TopicEngines) -> AttentionData:
    model = engines.loaded.model
    if not isinstance(model, Decoder):
        raise InvalidParameter("model", "this topic looks into our own decoder; choose a model that runs on it")
    tokens = tuple(engines.loaded.tokenizer.encode(SENTENCE, add_special_tokens=False))
    with _noting_inputs(model) as inputs:
        recorded, calls = engines.record_calls([TimedRequest("A", tokens, 1)], lambda call: call)
    words = tuple(engines.labels(tokens))
    asks = _pair(words)
    call, head = max(
        ((call, head) for call in calls for head in range(call.layer.num_heads)),
        key=lambda pair: float(_weights(*pair)[asks]),
    )
    layer = call.layer
    kv_head = head // (layer.num_heads // layer.num_kv_heads)
    weights = _weights(call, head)
    output = weights @ call.v[:, kv_head]
    return AttentionData(
        words=words,
        layer=layer.index,
        head=head,
        kv_head=kv_head,
        heads=layer.num_heads,
        layers=len(calls),
        scale=layer.scale,
        hidden=_matrix(inputs[-len(calls) :][layer.index]),  # the first ones are of a warm-up
        q=_matrix(call.q[:, head]),
        k=_matrix(call.k[:, kv_head]),
        v=_matrix(call.v[:, kv_head]),
        scores=_matrix(_scores(call, head)),
        weights=_matrix(weights),
        output=_matrix(output),
        difference=float((output - call.output[:, head]).abs().max()),
        asks=asks,
        run=recorded,
    )


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


def _pair(words: tuple[str, ...]) -> tuple[int, int]:
    if LOOKS_FROM in words and LOOKS_AT in words:
        return words.index(LOOKS_FROM), words.index(LOOKS_AT)
    return len(words) - 3, 1  # other tokenizers cut other pieces


def _scores(call: AttentionCall, head: int) -> Tensor:
    group = call.layer.num_heads // call.layer.num_kv_heads
    return call.q[:, head] @ call.k[:, head // group].T * call.layer.scale


def _weights(call: AttentionCall, head: int) -> Tensor:
    scores = _scores(call, head)
    mask = visible_mask(call.layer, 0, len(scores), scores.device)
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)


def _matrix(tensor: Tensor) -> Matrix:
    return tuple(tuple(round(value, 5) for value in row) for row in tensor.tolist())


def draw(data: AttentionData) -> Sheet:
    title = f"One attention head at work: layer {data.layer + 1} of {data.layers}, head {data.head + 1} of {data.heads}"
    sheet = Sheet(title, size=(12, 8.6))
    grid = sheet.grid(2, 12, height_ratios=[1, 1.35])
    size = len(data.q[0])
    for column, (name, title) in enumerate(
        (
            ("hidden", f"① each token is {len(data.hidden[0])} numbers"),
            ("q", f"② Q, its question: {size} numbers"),
            ("k", f"③ K, its label: {size} numbers"),
            ("v", f"④ V, its content: {size} numbers"),
        )
    ):
        panel = sheet.panel(name, grid[0, 3 * column : 3 * column + 3])
        _draw_numbers(panel, title, getattr(data, name), _typical(getattr(data, name)))
        if name == "hidden":
            panel.row_names(data.words, size=8.5)
    _draw_scores(sheet.panel("scores", grid[1, 0:5]), data)
    _draw_weights(sheet.panel("weights", grid[1, 5:9]), data)
    _draw_numbers(sheet.panel("output", grid[1, 9:12]), "⑦ output: a mix of V", data.output, _typical(data.v))
    sheet.legend(
        {"masked": "mask: it comes later, so it does not count"},
        [
            (Look("#5d3a8c"), "a number above zero"),
            (Look("#e08214"), "a number below zero"),
            (Look("#2171b5"), "a large share of the attention"),
        ],
    )
    return sheet


def _typical(values: Matrix) -> float:
    """A bound that most numbers keep, so that a few large ones do not fade all others."""
    flat = sorted(abs(value) for row in values for value in row)
    return flat[int(0.98 * (len(flat) - 1))] or 1.0


def _draw_numbers(panel: Panel, title: str, values: Matrix, most: float) -> None:
    panel.title(title)
    panel.heat(values, "number", most)
    panel.grid_only(len(values[0]), len(values), equal=False)


def _draw_scores(panel: Panel, data: AttentionData) -> None:
    import matplotlib

    panel.title("⑤ scores: every Q with every K")
    most = max(abs(data.scores[i][j]) for i in range(len(data.words)) for j in range(i + 1)) or 1.0
    colours = matplotlib.colormaps["PuOr"]
    for i, row in enumerate(data.scores):
        for j, score in enumerate(row):
            if j > i:
                panel.cell(j, i, "masked", "×")
            else:
                _number(panel, j, i, "score", f"{score:.1f}".replace("-0.0", "0.0"), colours(0.5 + 0.5 * score / most))
    _name_tokens(panel, data)
    panel.row_names(data.words, size=8.5)


def _draw_weights(panel: Panel, data: AttentionData) -> None:
    import matplotlib

    panel.title("⑥ after the mask and softmax: %")
    colours = matplotlib.colormaps["Blues"]
    for i, row in enumerate(data.weights):
        for j, weight in enumerate(row[: i + 1]):
            _number(panel, j, i, "weight", f"{100 * weight:.0f}", colours(weight))
    _name_tokens(panel, data)
    asking, asked = data.asks
    panel.frame(asked, asking, 1, 1, look_of("recomputed").fill, linewidth=2)


def _number(panel: Panel, x: float, y: float, kind: str, label: str, colour: tuple[float, ...]) -> None:
    from matplotlib.colors import to_hex

    bright = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 0.55
    panel.cell(x, y, kind, label, look=Look(to_hex(colour), INK if bright else PALE_INK), size=7)


def _name_tokens(panel: Panel, data: AttentionData) -> None:
    panel.grid_only(len(data.words), len(data.words), equal=False)
    panel.column_names(data.words, size=8.5, rotation=40)


def figures(data: AttentionData) -> dict[str, Any]:
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


TOPIC = Topic("attention", run, {"attention": draw}, figures)
