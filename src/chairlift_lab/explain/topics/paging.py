"""The KV cache as virtual memory: logical blocks, a block table, physical blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift_lab.explain.drawing import Panel, Sheet, owner_look
from chairlift_lab.explain.guide import Topic
from chairlift_lab.explain.recording import Run, TopicEngines

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


def run(engines: TopicEngines) -> PagingData:
    requests = engines.requests(((7, 12, 0), (6, 12, 1)), skip=17)
    played = engines.record(
        requests, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_batch_requests=4, prefix_caching=False
    )
    last = max(step.turn for step in played.steps if len(step.chunks) == len(requests))
    step = played.steps[last]
    memories = []
    for request in requests:
        made = [token for past in played.steps[:last] for token in past.sampled.get(request.name, ())]
        (chunk,) = (chunk for chunk in step.chunks if chunk.request == request.name)
        tokens = (*request.prompt, *made)[: chunk.end]
        memories.append(RequestMemory(request.name, tuple(engines.labels(tokens)), chunk.table))
    return PagingData(BLOCK_SIZE, NUM_BLOCKS, tuple(memories), played)


def contents(data: PagingData) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Of each block in use: whose it is, and its words."""
    blocks = {}
    for memory in data.requests:
        for place, block in enumerate(memory.table):
            start = place * data.block_size
            blocks[block] = memory.request, memory.words[start : start + data.block_size]
    return blocks


def draw(data: PagingData) -> Sheet:
    sheet = Sheet("From a token's place in its text to its place in memory", size=(11.5, 8.4))
    panel = sheet.panel("memory")
    physical = contents(data)
    spot = 1.3  # the width of a token's slot
    wide = data.block_size * spot
    table_at, memory_at = wide + 2.2, wide + 6.4
    panel.text(wide / 2, -0.7, "what each request sees: logical blocks", size=10, weight="bold")
    panel.text(table_at + 0.9, -0.7, "block tables", size=10, weight="bold")
    panel.text(memory_at + wide / 2, -0.7, "the memory: physical blocks", size=10, weight="bold")
    y = 0.0
    for index, memory in enumerate(data.requests):
        for place, block in enumerate(memory.table):
            words = memory.words[place * data.block_size : (place + 1) * data.block_size]
            _draw_block(panel, 0, y, words, data.block_size, index, spot)
            panel.text(-0.2, y + 0.5, f"{memory.request} {place}", ha="right", size=9)
            panel.cell(table_at, y, "entry", f"{place} → {block}", width=1.8, look=owner_look(index), size=9)
            style = {"mutation_scale": 9, "color": owner_look(index).fill, "linewidth": 1.5}
            panel.arrow((wide + 0.1, y + 0.5), (table_at, y + 0.5), **style)
            panel.arrow((table_at + 1.85, y + 0.5), (memory_at - 0.75, block + 0.5), **style)
            panel.drawn["arrow"] += 2
            y += 1
        y += 1
    owners = [memory.request for memory in data.requests]
    for block in range(data.num_blocks):
        owner, words = physical.get(block, ("", ()))
        _draw_block(panel, memory_at, block, words, data.block_size, owners.index(owner) if owner else None, spot)
        panel.text(memory_at - 0.2, block + 0.5, str(block), ha="right", size=9)
    panel.grid_only(memory_at + wide, max(y - 1, data.num_blocks), equal=False)
    panel.axes.set_xlim(-1.1, memory_at + wide + 0.1)
    panel.axes.set_ylim(max(y - 1, data.num_blocks) + 0.1, -1.2)
    looks = [(owner_look(index), f"belongs to {name}") for index, name in enumerate(owners)]
    sheet.legend({"free": "a slot without a token"}, looks)
    return sheet


def _draw_block(
    panel: Panel, x: float, y: float, words: tuple[str, ...], size: int, owner: int | None, spot: float
) -> None:
    side = "logical" if x == 0 else "physical"
    for slot in range(size):
        if slot < len(words) and owner is not None:
            word = words[slot] if len(words[slot]) < 10 else words[slot][:8] + "…"
            panel.cell(x + slot * spot, y, side, word, width=spot, look=owner_look(owner), size=7.5)
        else:
            panel.cell(x + slot * spot, y, "free", width=spot)


def figures(data: PagingData) -> dict[str, Any]:
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


TOPIC = Topic("paging", run, {"paging": draw}, figures)
