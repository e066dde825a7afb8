"""Blocks, tables and heads: what is drawn against the engine's books."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chairlift.engine.memory_plan import bytes_per_token
from chairlift_lab.explain.recording import Run, TopicEngines
from chairlift_lab.explain.topics.attention import Heads
from chairlift_lab.explain.topics.memory import (
    BLOCK_SIZE,
    MOMENTS,
    POOL_BLOCKS,
    SYSTEM,
    Cache,
    Paging,
    Prefix,
    PrefixData,
)
from tests.tiny import write_windowed_checkpoint


@pytest.fixture(scope="module")
def prefix_data(engines: TopicEngines) -> PrefixData:
    return Prefix().run(engines)


@pytest.fixture(scope="module")
def drawn(prefix_data: PrefixData) -> dict[str, dict[str, int]]:
    return Prefix().draw(prefix_data).drawn


def _references(tables: dict[str, tuple[int, ...]]) -> Counter[int]:
    return Counter(block for table in tables.values() for block in table)


def test_the_records_of_a_run_agree(prefix_data: PrefixData) -> None:
    """Counted from the tables, every block has as many references as the pool says, and StepDone as many in use."""
    run: Run = prefix_data.run
    for step, done in zip(run.steps, run.done(), strict=True):
        counted = _references(step.tables)
        assert [counted[block] for block in range(len(step.references))] == list(step.references)
        assert done.used_blocks == len(counted)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_tables_drawn_are_those_of_the_step(
    prefix_data: PrefixData, drawn: dict[str, dict[str, int]], moment: str
) -> None:
    step = prefix_data.run.steps[getattr(prefix_data, moment)]
    counted = _references(step.tables)
    table, pool = drawn[moment], drawn[f"{moment} pool"]
    copied = sum(len(chunk.copies) for chunk in step.chunks)
    assert table["shared"] == sum(count for count in counted.values() if count > 1)
    assert table.get("copied", 0) == copied == (1 if moment == "copying" else 0)
    assert table["own"] + copied == sum(count for count in counted.values() if count == 1)
    assert pool["shared"] == sum(count > 1 for count in counted.values())
    assert pool["own"] == sum(count == 1 for count in counted.values())
    assert sum(pool.values()) == POOL_BLOCKS
    assert Prefix().saved(step) == sum(count - 1 for count in counted.values())


def test_sharing_equals_the_cached_tokens_at_admission(prefix_data: PrefixData) -> None:
    cached = {event.request_id: event.cached_tokens for event in prefix_data.run.admitted()}
    assert cached["A"] == 0
    assert cached["B"] == cached["C"] == SYSTEM
    first = prefix_data.run.steps[prefix_data.sharing]
    assert Prefix().saved(first) == cached["B"] // BLOCK_SIZE
    text = Prefix().filled(prefix_data)
    assert f"{Prefix().saved(first)} blocks are saved" in text
    assert f"{Prefix().reusable(prefix_data.run.steps[prefix_data.leaving])} blocks here" in text
    assert Prefix().reusable(prefix_data.run.steps[prefix_data.leaving]) > 0


def test_every_token_is_drawn_where_its_table_says(engines: TopicEngines) -> None:
    data = Paging().run(engines)
    drawn = Paging().draw(data).drawn["memory"]
    tokens = sum(len(memory.words) for memory in data.requests)
    entries = sum(len(memory.table) for memory in data.requests)
    assert drawn["logical"] == drawn["physical"] == tokens
    assert drawn["entry"] == entries
    assert drawn["arrow"] == 2 * entries
    empty = entries * data.block_size - tokens
    unused = (data.num_blocks - entries) * data.block_size
    assert drawn["free"] == 2 * empty + unused
    assert max(done.used_blocks for done in data.run.done()) >= entries
    for memory in data.requests:
        assert len(memory.table) == -(-len(memory.words) // data.block_size)
    used = [block for memory in data.requests for block in memory.table]
    assert len(set(used)) == len(used), "nothing is shared here"
    assert data.requests[0].table != tuple(range(len(data.requests[0].table))), "and the blocks lie apart"
    held = data.contents()
    place = len(data.requests[0].words) - 1
    block = data.requests[0].table[place // data.block_size]
    assert held[block][1][place % data.block_size] == data.requests[0].words[place]


def test_the_bytes_drawn_are_those_of_the_model(engines: TopicEngines) -> None:
    data = Heads().run(engines)
    drawn = Heads().draw(data).drawn
    model = engines.loaded.model
    mine = Heads().own(data)
    assert mine.bytes_per_token == bytes_per_token(model.attention_layers, model.dtype)
    for variant in data.variants:
        formula = 2 * data.layers * variant.kv_heads * data.head_dim * data.number_bytes
        assert variant.bytes_per_token == formula
        cells = drawn[variant.name]
        assert cells == {"query": data.heads, "key": variant.kv_heads, "line": data.heads}
    assert [variant.kv_heads for variant in data.variants] == [4, 2, 1]
    assert data.variants[0].texts < data.variants[1].texts < data.variants[2].texts
    (request,) = data.run.requests
    assert data.tokens == len(request.prompt) + request.new_tokens - 1


def test_a_model_with_windows_computes_the_same_without_a_cache(tmp_path: Path) -> None:
    """Every step without a cache computes all tokens as one chunk, in all block tables of the model."""
    data = Cache().run(TopicEngines.load(str(write_windowed_checkpoint(tmp_path / "gemma3"))))
    assert data.same_output
    assert data.unchanged_before
