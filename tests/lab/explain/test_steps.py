"""Pictures of the cache, kernels, chunks, draft tokens and the cost model, compared with the run."""

from __future__ import annotations

import pytest

from chairlift.core.events import BudgetDecided, DraftsVerified, TokenProduced
from chairlift_lab.explain.recording import TopicEngines
from chairlift_lab.explain.topics.flash import Flash, ScoreTile
from chairlift_lab.explain.topics.masks import WAYS, Kernels
from chairlift_lab.explain.topics.memory import NEW, PROMPT, Cache, CacheData
from chairlift_lab.explain.topics.speed import Cost, Speculation
from chairlift_lab.explain.topics.steps import CHUNK, LONG, PLANS, Chunking, ChunkingData


@pytest.fixture(scope="module")
def cache_data(engines: TopicEngines) -> CacheData:
    return Cache().run(engines)


@pytest.fixture(scope="module")
def chunking_data(engines: TopicEngines) -> ChunkingData:
    return Chunking().run(engines)


def test_what_is_computed_again_is_counted(cache_data: CacheData) -> None:
    data = cache_data
    drawn = Cache().draw(data).drawn
    done = data.run.done()
    computed = sum(step.prefill_tokens + step.decode_tokens for step in done)
    assert drawn["with"]["new"] == computed == PROMPT + NEW - 1
    again = sum(PROMPT + step for step in range(NEW)) - computed
    assert drawn["without"] == {"new": computed, "recomputed": again}
    assert drawn["with"]["cached"] == again, "the same triangle, kept instead of computed"
    assert data.same_output


def test_a_new_token_changes_nothing_before_it(engines: TopicEngines, cache_data: CacheData) -> None:
    data = cache_data
    drawn = Cache().draw_past(data).drawn["layers"]
    layers, length = len(data.differences), len(data.before)
    assert layers == len(engines.loaded.model.attention_layers)
    assert data.unchanged_before == layers * data.changed
    assert all(apart > 0 for row in data.differences[1:] for apart in row[data.changed :])
    assert drawn["unchanged"] == layers * data.changed + (length - data.changed - 1), "in the first layer, none sees it"
    assert sum(drawn.values()) == layers * length


def test_three_kernels_do_the_same_step(engines: TopicEngines) -> None:
    data = Kernels().run(engines)
    drawn = Kernels().draw(data).drawn
    useful = data.ways["ragged"].useful_pairs
    assert {drawn[name]["useful"] for name in WAYS} == {useful}
    assert drawn["ragged"] == {"useful": useful}
    assert sum(drawn["bursted"].values()) == data.ways["bursted"].pairs
    assert sum(drawn["padded"].values()) == data.ways["padded"].pairs
    padded = data.ways["padded"]
    rows = sum(padded.rows) - sum(end - start for start, end in zip(padded.starts, padded.ends, strict=True))
    assert padded.padding == rows > 0
    steps = data.runs["padded"].steps
    place = next(index for index, step in enumerate(steps) if Kernels().mixed(step, 4))
    assert data.runs["padded"].done()[place].padding_tokens == rows
    assert data.ways["bursted"].calls == len(steps[place].chunks)
    assert data.apart < 1e-4


@pytest.mark.parametrize("name", PLANS)
def test_every_chunk_is_drawn(chunking_data: ChunkingData, name: str) -> None:
    data = chunking_data
    run = data.runs[name]
    drawn = Chunking().draw(data).drawn[name]
    done = run.done()
    assert drawn["decode"] == sum(step.decode_tokens for step in done)
    assert sum(drawn.values()) == sum(step.requests for step in done)
    pieces = run.prompt_chunks(data.long)
    assert sum(pieces) == LONG
    assert len(pieces) == (1 if name == "whole" else -(-LONG // CHUNK))
    assert max(step.prefill_tokens for step in done) == (LONG if name == "whole" else CHUNK)
    produced = sum(isinstance(event, TokenProduced) for event in run.events)
    assert produced == sum(request.new_tokens for request in run.requests)
    assert data.longest_gap(name) > 0
    assert data.first_token(name) > 0


def test_draft_tokens_are_drawn_as_they_were_verified(engines: TopicEngines) -> None:
    # A random model soon repeats itself, and then draft tokens are accepted.
    texts = {"one": ("a chair, a chair, a chair, a chair, a", 150), "two": ("ab ab ab ab ab ab", 60)}
    data = Speculation().run(engines, texts)
    drawn = Speculation().draw(data).drawn
    verified = [event for event in data.run.events if isinstance(event, DraftsVerified)]
    assert any(event.accepted for event in verified)
    assert any(event.accepted < event.proposed for event in verified)
    for name, (_, new) in texts.items():
        mine = [event for event in verified if event.request_id == name]
        assert drawn[name].get("accepted", 0) == sum(event.accepted for event in mine)
        assert drawn[name].get("rejected", 0) == sum(event.proposed - event.accepted for event in mine)
        assert drawn[name].get("accepted", 0) + drawn[name]["decode"] >= new
        assert data.plain_steps(name) == new
    assert Speculation().figures(data)["proposed"] == sum(event.proposed for event in verified)
    assert data.same_output


def test_the_tiles_are_those_of_the_kernel_and_no_score_is_written(engines: TopicEngines) -> None:
    data = Flash().run(engines)
    drawn = Flash().draw(data).drawn["tiles"]
    lasts = [tile.last for tile in data.made if tile.keys == 0]
    made = sum(keys <= last for last in lasts for keys in range(0, data.tokens, data.tile_keys))
    assert drawn["loaded"] + drawn["held"] == made == len(data.made)
    assert drawn["held"] == 1
    assert drawn["skipped"] == len(data.skipped) == len(lasts) * -(-data.tokens // data.tile_keys) - made
    assert all(tile.keys > tile.last for tile in data.skipped)
    seen = {(row, key) for tile in data.made for row in range(tile.first, tile.last + 1) for key in _keys(tile)}
    assert all((row, key) in seen for row in range(data.tokens) for key in range(row + 1)), "nothing is left out"
    assert data.stores["output"] == data.tokens * data.heads * data.head_dim
    assert data.written_besides == 0
    assert data.loads["keys"] == data.loads["values"] < data.table_size * data.head_dim
    assert data.difference < 1e-4, "the compiled kernel came to the same"
    assert data.walk[-1].error < 1e-4
    assert len(data.walk) == data.row // data.tile_keys + 1


def _keys(tile: ScoreTile) -> range:
    return range(tile.keys, tile.keys + tile.count)


def test_the_chunk_drawn_is_the_one_that_was_chosen(engines: TopicEngines) -> None:
    data = Cost().run(engines)
    drawn = Cost().draw(data).drawn
    done = data.run.done()
    assert drawn["steps"]["decode"] == sum(step.decode_tokens for step in done)
    assert drawn["steps"]["prefill"] == sum(step.prefill_tokens for step in done)
    assert drawn["predictions"]["point"] == sum(step.predicted_seconds is not None for step in done) > 0
    choice = data.shown
    assert drawn["choice"]["size"] == len(choice.sizes)
    assert choice.chosen in choice.sizes
    decided = {event.limits.prefill_tokens for event in data.run.events if isinstance(event, BudgetDecided)}
    assert {decision.chosen for decision in data.decisions} <= decided
    for decision in data.decisions:
        assert data.prefill[decision.step] <= decision.chosen
        assert list(decision.seconds) == sorted(decision.seconds), "more work never takes less time"
