"""Keys and values in memory: why they are kept, in which blocks they lie, and how requests share these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import StartedEngine
from chairlift_lab.common.engines import whole_chunk
from chairlift_lab.explain.drawing import INK, Look, Panel, Sheet, look_of, owner_look
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, StepRecord, TimedRequest, TopicEngines

PROMPT, NEW = 5, 9
CHANGED = 6  # the place of the token that is exchanged in the second experiment
TOKENS = 11

Spans = tuple[tuple[int, int], ...]
"""The (start, count) of the tokens that each step computed."""


@dataclass(frozen=True, slots=True)
class CacheData:
    words: tuple[str, ...]  # prompt and output
    num_prompt: int
    without: Spans
    with_cache: Spans
    same_output: bool
    before: tuple[str, ...]  # a text, and the same with one word exchanged
    after: tuple[str, ...]
    changed: int
    differences: tuple[tuple[float, ...], ...]  # [layers][positions]: how much keys and values differ, relatively
    run: Run

    @property
    def unchanged_before(self) -> int:
        return sum(not apart for row in self.differences for apart in row[: self.changed])


class Cache(Topic):
    """Generation without a KV cache and with one, and why what is cached stays right."""

    def run(self, engines: TopicEngines) -> CacheData:
        prompt = engines.prompt(PROMPT)
        played = engines.record([TimedRequest("A", prompt, NEW)], prefix_caching=False)
        output = played.output("A")
        # Without a cache, every step reads the whole text from its first token.
        started = engines.start(prefix_caching=False)
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(_next_token(started, tokens))
        text = engines.prompt(TOKENS, skip=24)
        other = (*text[:CHANGED], engines.prompt(1, skip=60)[0], *text[CHANGED + 1 :])
        layers = zip(_keys_and_values(engines, text), _keys_and_values(engines, other), strict=True)
        return CacheData(
            words=tuple(engines.labels((*prompt, *output))),
            num_prompt=PROMPT,
            without=tuple((0, PROMPT + made) for made in range(NEW)),
            with_cache=tuple((chunk.start, chunk.count) for step in played.steps for chunk in step.chunks),
            same_output=tokens[PROMPT:] == output,
            before=tuple(engines.labels(text)),
            after=tuple(engines.labels(other)),
            changed=CHANGED,
            differences=tuple(tuple(((a - b).norm(dim=-1) / a.norm(dim=-1)).tolist()) for a, b in layers),
            run=played,
        )

    @property
    def pictures(self) -> dict[str, Any]:
        return {"cache": self.draw, "cache-past": self.draw_past}

    def draw(self, data: CacheData) -> Sheet:
        sheet = Sheet("cache")
        grid = sheet.grid(1, 2)
        for column, (name, spans) in enumerate((("without", data.without), ("with", data.with_cache))):
            panel = sheet.panel(name, grid[0, column])
            panel.title(f"{name} a cache", f"{sum(count for _, count in spans)} tokens computed")
            _draw_steps(panel, data.words, spans)
        return sheet

    def draw_past(self, data: CacheData) -> Sheet:
        sheet = Sheet("cache-past", old=data.before[data.changed], new=data.after[data.changed])
        panel = sheet.panel("layers")
        for layer, row in enumerate(data.differences):
            for position, apart in enumerate(row):
                look = Look.shade("Blues", 0.25 + 0.75 * min(apart, 1.0)) if apart else look_of("empty")
                panel.cell(position, layer, "changed" if apart else "unchanged", look=look)
        layers = len(data.differences)
        panel.grid_only(len(data.before), layers, equal=False)
        ticks = [layer for layer in range(layers) if layer % 5 == 0 or layer == layers - 1]
        panel.axes.set_yticks([layer + 0.5 for layer in ticks], [f"layer {layer + 1}" for layer in ticks])
        names = [a if a == b else f"{a} → {b}" for a, b in zip(data.before, data.after, strict=True)]
        panel.column_names(names, size=9, rotation=30)
        sheet.also = [
            (look_of("empty"), "keys and values exactly as before"),
            (Look.shade("Blues", 0.35), "changed a little"),
            (Look.shade("Blues", 1.0), "changed very much"),
        ]
        return sheet

    def figures(self, data: CacheData) -> dict[str, Any]:
        without, with_cache = (sum(count for _, count in spans) for spans in (data.without, data.with_cache))
        return {
            "without": without,
            "with_cache": with_cache,
            "more": without / with_cache,
            "same": "the same text" if data.same_output else "another text (rounding decided between two equal tokens)",
            "unchanged": data.unchanged_before,
            "before": data.changed * len(data.differences),
        }


def _next_token(started: StartedEngine, tokens: list[int]) -> int:
    request = Request("A", tokens, SamplingParams(temperature=0.0), max_new_tokens=1, arrival=0.0)
    result = started.runner.run(StepPlan(0, (whole_chunk(started.memory, request, samples=True),)))
    started.runner.forget(request.id)
    return result.tokens[0]


def _keys_and_values(engines: TopicEngines, tokens: tuple[int, ...]) -> list[Tensor]:
    """[positions, numbers] for each layer."""
    request = TimedRequest("A", tokens, 1)
    return engines.record_calls([request], lambda call: torch.cat((call.k.flatten(1), call.v.flatten(1)), dim=1))[1]


def _draw_steps(panel: Panel, words: tuple[str, ...], spans: Spans) -> None:
    computed = 0
    for row, (start, count) in enumerate(spans):
        for position in range(start + count):
            kind = "cached" if position < start else "recomputed" if position < computed else "new"
            panel.cell(position, row, kind)
        computed = start + count
        panel.text(computed + 0.15, row + 0.5, f"→ {words[computed]}", ha="left", size=8.5)
    panel.grid_only(len(words) + 1.5, len(spans), equal=False)
    panel.row_names([f"step {row + 1}" for row in range(len(spans))])
    panel.column_names(words[: len(words) - 1], size=8, rotation=55)
    panel.axes.tick_params(axis="x", pad=1)


# ---- blocks and tables ----------------------------------------------------------------------------------------------

BLOCK_SIZE, NUM_BLOCKS = 4, 14


@dataclass(frozen=True, slots=True)
class RequestMemory:
    request: str
    words: tuple[str, ...]  # the labels of all tokens that are in the cache
    table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagingData:
    block_size: int
    num_blocks: int
    requests: tuple[RequestMemory, ...]
    run: Run

    def contents(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """The number of the request that holds each block in use, and the words in it."""
        size = self.block_size
        return {
            block: (index, memory.words[place * size : (place + 1) * size])
            for index, memory in enumerate(self.requests)
            for place, block in enumerate(memory.table)
        }


class Paging(Topic):
    """The KV cache as virtual memory: logical blocks, a block table, physical blocks."""

    def run(self, engines: TopicEngines) -> PagingData:
        requests = engines.requests(((7, 12, 0), (6, 12, 1)), skip=17)
        played = engines.record(
            requests, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_requests=4, prefix_caching=False
        )
        last = max(step.turn for step in played.steps if len(step.chunks) == len(requests))
        memories = []
        for request, chunk in zip(requests, played.steps[last].chunks, strict=True):
            assert chunk.request == request.name
            made = [token for past in played.steps[:last] for token in past.sampled.get(request.name, ())]
            tokens = (*request.prompt, *made)[: chunk.end]
            memories.append(RequestMemory(request.name, tuple(engines.labels(tokens)), chunk.table))
        return PagingData(BLOCK_SIZE, NUM_BLOCKS, tuple(memories), played)

    def draw(self, data: PagingData) -> Sheet:
        sheet = Sheet("paging")
        panel = sheet.panel("memory")
        physical = data.contents()
        wide = data.block_size * SPOT
        table_at, memory_at = wide + 2.2, wide + 6.4
        panel.text(wide / 2, -0.7, "what each request sees: logical blocks", size=10, weight="bold")
        panel.text(table_at + 0.9, -0.7, "block tables", size=10, weight="bold")
        panel.text(memory_at + wide / 2, -0.7, "the memory: physical blocks", size=10, weight="bold")
        y = 0.0
        for index, memory in enumerate(data.requests):
            for place, block in enumerate(memory.table):
                _draw_block(panel, "logical", 0, y, physical[block], data.block_size)
                panel.text(-0.2, y + 0.5, f"{memory.request} {place}", ha="right", size=9)
                panel.cell(table_at, y, "entry", f"{place} → {block}", width=1.8, look=owner_look(index), size=9)
                style = {"mutation_scale": 9, "color": owner_look(index).fill, "linewidth": 1.5}
                panel.arrow((wide + 0.1, y + 0.5), (table_at, y + 0.5), **style)
                panel.arrow((table_at + 1.85, y + 0.5), (memory_at - 0.75, block + 0.5), **style)
                panel.drawn["arrow"] += 2
                y += 1
            y += 1
        for block in range(data.num_blocks):
            _draw_block(panel, "physical", memory_at, block, physical.get(block, (0, ())), data.block_size)
            panel.text(memory_at - 0.2, block + 0.5, str(block), ha="right", size=9)
        panel.grid_only(memory_at + wide, max(y - 1, data.num_blocks), equal=False, left=1.1, above=1.2)
        sheet.also = [(owner_look(index), f"belongs to {each.request}") for index, each in enumerate(data.requests)]
        return sheet

    def figures(self, data: PagingData) -> dict[str, Any]:
        first = data.requests[0]
        place = len(first.words) - 1
        logical, slot = divmod(place, data.block_size)
        return {
            "first": first,
            "place": place,
            "word": first.words[place],
            "logical": logical,
            "slot": slot,
            "block": first.table[logical],
            "empty": sum(len(memory.table) * data.block_size - len(memory.words) for memory in data.requests),
            "most": data.block_size - 1,
            "tables": "; ".join(f"{memory.request}: {', '.join(map(str, memory.table))}" for memory in data.requests),
        }


SPOT = 1.3  # the width of a token's slot


def _draw_block(
    panel: Panel, side: str, x: float, y: float, content: tuple[int, tuple[str, ...]], block_size: int
) -> None:
    owner, words = content
    for slot in range(block_size):
        if slot < len(words):
            word = words[slot] if len(words[slot]) < 10 else words[slot][:8] + "…"
            panel.cell(x + slot * SPOT, y, side, word, width=SPOT, look=owner_look(owner), size=7.5)
        else:
            panel.cell(x + slot * SPOT, y, "free", width=SPOT)


# ---- requests that begin alike --------------------------------------------------------------------------------------

POOL_BLOCKS = 24
SYSTEM = 12  # tokens that all prompts begin with: three full blocks
MOMENTS = {
    "sharing": "B finds the beginning of A",
    "copying": "C wants two answers, and they part",
    "leaving": "A is done",
}


@dataclass(frozen=True, slots=True)
class PrefixData:
    block_size: int
    system: int
    cached_tokens: dict[str, int]  # tokens that each request did not have to compute when it was admitted
    sharing: int  # index of the step in which A and B share the beginning
    copying: int  # index of the step in which a block is copied
    leaving: int  # index of the first step without A
    run: Run


class Prefix(Topic):
    """Requests with the same prefix share blocks; the first write to a shared block makes a copy."""

    def run(self, engines: TopicEngines) -> PrefixData:
        system = engines.prompt(SYSTEM)
        requests = [
            TimedRequest("A", (*system, *engines.prompt(5, skip=30)), 9),
            TimedRequest("B", (*system, *engines.prompt(7, skip=40)), 8, turn=2),
            TimedRequest("C", (*system, *engines.prompt(6, skip=50)), 9, turn=4, n=2),
        ]
        played = engines.record(requests, block_size=BLOCK_SIZE, num_blocks=POOL_BLOCKS, max_batch_requests=8)
        steps = list(enumerate(played.steps))
        return PrefixData(
            BLOCK_SIZE,
            SYSTEM,
            {event.request_id: event.cached_tokens for event in played.admitted()},
            next(index for index, step in steps if {"A", "B"} <= set(step.tables)),
            next(index for index, step in steps if _copies_of(step)),
            next(index for index, step in steps if index and "A" not in step.tables),
            played,
        )

    def draw(self, data: PrefixData) -> Sheet:
        sheet = Sheet("prefix")
        grid = sheet.grid(3, 2, width_ratios=[1.25, 1], height_ratios=[2.3, 4.2, 3.3])
        for row, (name, what) in enumerate(MOMENTS.items()):
            step = data.run.steps[getattr(data, name)]
            tables = sheet.panel(name, grid[row, 0])
            _draw_tables(tables, step)
            tables.title(f"step {step.step + 1}: {what}")
            pool = sheet.panel(f"{name} pool", grid[row, 1])
            used = sum(map(bool, step.references))
            pool.title("the memory", f"{used} of {len(step.references)} blocks in use")
            _draw_pool(pool, step, columns=8)
        return sheet

    def figures(self, data: PrefixData) -> dict[str, Any]:
        sharing, copying = data.run.steps[data.sharing], data.run.steps[data.copying]
        _, source, target = _copies_of(copying)[0]
        return {
            "sharing_step": sharing.step + 1,
            "copying_step": copying.step + 1,
            "cached_blocks": data.cached_tokens["B"] // data.block_size,
            "saved_by_sharing": self.saved(sharing),
            "saved_while_copying": self.saved(copying),
            "copies": len(_copies_of(copying)),
            "source": source,
            "target": target,
            "reusable": self.reusable(data.run.steps[data.leaving]),
        }

    def saved(self, step: StepRecord) -> int:
        """Additional blocks that would be needed without sharing."""
        return sum(references - 1 for references in step.references if references)

    def reusable(self, step: StepRecord) -> int:
        return sum(_block_state(step, block) == "reusable" for block in range(len(step.references)))


def _block_state(step: StepRecord, block: int) -> str:
    """The state of a block: shared (in several tables), own (in one), reusable (cached, in none) or free."""
    references = step.references[block]
    if references:
        return "shared" if references > 1 else "own"
    return "reusable" if block in step.cached else "free"


def _copies_of(step: StepRecord) -> list[tuple[str, int, int]]:
    return [(chunk.request, source, target) for chunk in step.chunks for source, target in chunk.copies]


def _draw_pool(panel: Panel, step: StepRecord, *, columns: int) -> None:
    """Draw every block with its number and its reference count."""
    for block, references in enumerate(step.references):
        kind = _block_state(step, block)
        x, y, ink = block % columns, block // columns, look_of(kind).ink
        panel.cell(x, y, kind)
        panel.text(x + 0.5, y + 0.36, str(block), color=ink, size=9.5)
        if references:
            panel.text(x + 0.5, y + 0.74, f"×{references}", color=ink, size=7.5)
    panel.grid_only(columns, -(-len(step.references) // columns))
    panel.axes.set_anchor("NW")


def _draw_tables(panel: Panel, step: StepRecord) -> None:
    copies = _copies_of(step)
    targets = {(request, target) for request, _, target in copies}
    names = list(step.tables)
    shown = [f"{name.partition('#')[0]}, 2nd" if "#" in name else name for name in names]
    for row, name in enumerate(names):
        for place, block in enumerate(step.tables[name]):
            kind = "copied" if (name, block) in targets else _block_state(step, block)
            panel.cell(place, row * 1.4, kind, str(block), size=10)
    for request, source, target in copies:
        place = step.tables[request].index(target)
        giver = next(name for name in names if source in step.tables[name])
        begin, end = names.index(giver) * 1.4 + 1, names.index(request) * 1.4 + 0.04
        panel.arrow((place + 0.5, begin), (place + 0.5, end), mutation_scale=11, color=INK, linewidth=1.2)
        panel.text(place + 0.62, (begin + end) / 2, f"copy {source} → {target}", ha="left", size=8)
    places = range(max(map(len, step.tables.values())))
    panel.grid_only(len(places), len(names) * 1.4 - 0.4, equal=False)
    panel.axes.set_yticks([row * 1.4 + 0.5 for row in range(len(names))], shown, fontsize=10, color=INK)
    panel.names_above([place + 0.5 for place in places], [f"logical {place}" for place in places], fontsize=8)
