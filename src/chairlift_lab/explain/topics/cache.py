"""Generation without a KV cache and with one, and why what is cached stays right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.runner.base import ModelRunner
from chairlift_lab.explain.drawing import Look, Panel, Sheet, look_of
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import AttentionCall, Run, TimedRequest, TopicEngines

PROMPT, NEW = 5, 9
CHANGED = 6  # the place of the token that is exchanged in the second experiment
TOKENS = 11


@dataclass(frozen=True, slots=True)
class CacheData:
    words: tuple[str, ...]  # prompt and output
    num_prompt: int
    without: tuple[tuple[int, int], ...]  # the (start, count) that each step computed
    with_cache: tuple[tuple[int, int], ...]
    same_output: bool
    before: tuple[str, ...]  # a text, and the same with one word exchanged
    after: tuple[str, ...]
    changed: int
    differences: tuple[tuple[float, ...], ...]  # [layers][positions]: how much keys and values differ, relatively
    run: Run


def run(engines: TopicEngines) -> CacheData:
    prompt = engines.prompt(PROMPT)
    played = engines.record([TimedRequest("A", prompt, NEW)], prefix_caching=False)
    output = played.output("A")
    generated, spans = _without_cache(engines, prompt)
    text = engines.prompt(TOKENS, skip=24)
    other = (*text[:CHANGED], engines.prompt(1, skip=60)[0], *text[CHANGED + 1 :])
    return CacheData(
        words=tuple(engines.labels((*prompt, *output))),
        num_prompt=PROMPT,
        without=tuple(spans),
        with_cache=tuple((chunk.start, chunk.count) for step in played.steps for chunk in step.chunks),
        same_output=generated == output,
        before=tuple(engines.labels(text)),
        after=tuple(engines.labels(other)),
        changed=CHANGED,
        differences=_differences(engines, text, other),
        run=played,
    )


def _without_cache(engines: TopicEngines, prompt: tuple[int, ...]) -> tuple[list[int], list[tuple[int, int]]]:
    """Generate as if nothing were kept: every step reads the whole text from its first token."""
    runner: ModelRunner = engines.start(prefix_caching=False).runner
    tokens, spans = list(prompt), []
    for _ in range(NEW):
        tokens.append(_next_token(runner, tokens))
        spans.append((0, len(tokens) - 1))
    return tokens[len(prompt) :], spans


def _next_token(runner: ModelRunner, tokens: list[int]) -> int:
    request = Request("A", tokens, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    table = range(-(-len(tokens) // runner.storage.block_size))
    result = runner.run(StepPlan(0, (Chunk(request, 0, len(tokens), table, samples=True),)))
    runner.forget(request.id)
    return result.tokens[0]


def _differences(engines: TopicEngines, text: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """How far the keys and values of two texts are apart, for each layer and position."""
    layers = zip(_keys_and_values(engines, text), _keys_and_values(engines, other), strict=True)
    return tuple(tuple(((a - b).norm(dim=-1) / a.norm(dim=-1)).tolist()) for a, b in layers)


def _keys_and_values(engines: TopicEngines, tokens: tuple[int, ...]) -> list[Tensor]:
    """[positions, numbers] for each layer."""

    def keys_and_values(call: AttentionCall) -> Tensor:
        return torch.cat((call.k.flatten(1), call.v.flatten(1)), dim=1)

    return engines.record_calls([TimedRequest("A", tokens, 1)], keys_and_values)[1]


def draw_generation(data: CacheData) -> Sheet:
    sheet = Sheet("Making the same text without a KV cache, and with one", size=(11.5, 5.6))
    grid = sheet.grid(1, 2)
    for column, (name, spans) in enumerate((("without", data.without), ("with", data.with_cache))):
        panel = sheet.panel(name, grid[0, column])
        panel.title(f"{name} a cache", f"{sum(count for _, count in spans)} tokens computed")
        _draw_steps(panel, data, spans)
    sheet.legend(
        {
            "new": "computed for the first time",
            "recomputed": "computed again, with the same result",
            "cached": "keys and values are in the cache",
        }
    )
    return sheet


def _draw_steps(panel: Panel, data: CacheData, spans: tuple[tuple[int, int], ...]) -> None:
    computed = 0
    for row, (start, count) in enumerate(spans):
        for position in range(start + count):
            kind = "cached" if position < start else "recomputed" if position < computed else "new"
            panel.cell(position, row, kind)
        computed = start + count
        panel.text(computed + 0.15, row + 0.5, f"→ {data.words[computed]}", ha="left", size=8.5)
    panel.grid_only(len(data.words) + 1.5, len(spans), equal=False)
    panel.row_names([f"step {row + 1}" for row in range(len(spans))])
    panel.column_names(data.words[: len(data.words) - 1], size=8, rotation=55)
    panel.axes.tick_params(axis="x", pad=1)


def draw_past(data: CacheData) -> Sheet:
    title = f"Exchange one word (“{data.before[data.changed]}” for “{data.after[data.changed]}”): what changes?"
    sheet = Sheet(title, size=(10, 6.2))
    panel = sheet.panel("layers")
    import matplotlib
    from matplotlib.colors import to_hex

    colours = matplotlib.colormaps["Blues"]
    for layer, row in enumerate(data.differences):
        for position, apart in enumerate(row):
            look = Look(to_hex(colours(0.25 + 0.75 * min(apart, 1.0)))) if apart else look_of("empty")
            panel.cell(position, layer, "changed" if apart else "unchanged", look=look)
    layers = len(data.differences)
    panel.grid_only(len(data.before), layers, equal=False)
    ticks = [layer for layer in range(layers) if layer % 5 == 0 or layer == layers - 1]
    panel.axes.set_yticks([layer + 0.5 for layer in ticks], [f"layer {layer + 1}" for layer in ticks])
    names = [a if a == b else f"{a} → {b}" for a, b in zip(data.before, data.after, strict=True)]
    panel.column_names(names, size=9, rotation=30)
    sheet.legend(
        {},
        [
            (look_of("empty"), "keys and values exactly as before"),
            (Look(to_hex(colours(0.35))), "changed a little"),
            (Look(to_hex(colours(1.0))), "changed very much"),
        ],
    )
    return sheet


def unchanged_before(data: CacheData) -> int:
    return sum(not apart for row in data.differences for apart in row[: data.changed])


def figures(data: CacheData) -> dict[str, Any]:
    without, with_cache = (sum(count for _, count in spans) for spans in (data.without, data.with_cache))
    return {
        "without": without,
        "with_cache": with_cache,
        "more": without / with_cache,
        "same": "the same text" if data.same_output else "another text (rounding decided between two equal tokens)",
        "unchanged": unchanged_before(data),
        "before": data.changed * len(data.differences),
    }


TOPIC = Topic("cache", run, {"cache": draw_generation, "cache-past": draw_past}, figures)
