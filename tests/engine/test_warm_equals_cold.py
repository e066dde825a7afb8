"""On a CPU a request's greedy tokens are the same alone, together, in chunks and behind cached prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, RequestAdmitted, RequestPreempted, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from tests.kernels.tiny_config import CONFIG

# Long enough for several tiles and pieces of attention, and for hits at every place of a block of 4 tokens.
LENGTHS = (3, 66, 131, 270, 17, 65, 129, 258)
OWN = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 300, "max_position_embeddings": 512}


def config(**options: object) -> EngineConfig:
    defaults: dict[str, object] = {"device": "cpu", "kv_memory": "8MiB", "block_size": 4, "load_format": "dummy"}
    return EngineConfig(**(defaults | options))  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    """The second half begin as the longest one does, and end at other places of its blocks."""
    generator = torch.Generator().manual_seed(0)
    own = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in LENGTHS]
    return own[:4] + [[*own[3][: length - 1], 5] for length in LENGTHS[4:]]


def generate(
    engine: Engine, prompt_ids: list[list[int]], *, at_once: bool = True
) -> tuple[list[list[int]], list[object]]:
    """The greedy tokens of each prompt, and all events."""
    tokens: dict[str, list[int]] = {}
    events: list[object] = []
    for index, prompt in enumerate(prompt_ids):
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)
        engine.submit(prompt, params, request_id=str(index))
        tokens[str(index)] = []
        while engine.has_work and not (at_once and index + 1 < len(prompt_ids)):
            events += engine.step()
    engine.check_alive()
    for event in events:
        if isinstance(event, TokenProduced):
            tokens[event.request_id].append(event.token)
    return list(tokens.values()), events


@pytest.fixture(scope="module", params=["none", "int8", "bfloat16", "blocks"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models")
    (folder / "config.json").write_text(json.dumps(CONFIG | OWN))
    return load_model(str(folder), config(quantization=request.param), progress=False)


def test_greedy_tokens_do_not_depend_on_what_is_computed_with_them(loaded: LoadedModel) -> None:
    prompt_ids, quantization = prompts(), loaded.model.quantization

    def engine(**options: object) -> Engine:
        return start_engine(loaded, config(quantization=quantization, **options)).engine

    cold = engine(prefix_caching=False)
    alone, _ = generate(cold, prompt_ids, at_once=False)
    warm = engine()
    assert generate(warm, prompt_ids, at_once=False)[0] == alone, "behind prefixes of other prompts"
    again, events = generate(warm, prompt_ids)
    hits = [event.cached_tokens for event in events if isinstance(event, RequestAdmitted)]
    assert sum(hits) > 0
    assert again == alone, "behind their own prefixes, together"
    assert generate(engine(max_batch_tokens=37, max_batch_requests=5), prompt_ids)[0] == alone, "in chunks"
    tokens_in_cache = 300  # fewer than the prompts have together
    memory = tokens_in_cache * 64 * (4 if quantization == "none" else 2)
    small, events = generate(engine(kv_memory=memory, max_batch_requests=8), prompt_ids)
    assert any(isinstance(event, RequestPreempted) for event in events)
    assert small == alone, "preempted"
    drafted, events = generate(engine(speculate="ngram"), prompt_ids)
    assert any(isinstance(event, DraftsVerified) for event in events)
    assert drafted == alone, "with drafts"


def test_the_start_says_what_may_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loaded: LoadedModel
) -> None:
    with caplog.at_level("INFO", logger="chairlift"):
        start_engine(loaded, config(quantization=loaded.model.quantization))
    assert "the same alone, together and behind cached prefixes" in caplog.text
    with caplog.at_level("INFO", logger="chairlift"):
        start_engine(loaded, config(quantization=loaded.model.quantization, attention="bursted"))
    assert "may depend on the batch and on cached prefixes: bursted attention" in caplog.text
