"""Tiny checkpoints of every family with recurrent layers through the whole engine: however prompts are cut, cached,
preempted, drafted or shared, the tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, Event, RequestAdmitted, StepDone, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.errors import InvalidParameter
from chairlift.text.tokenizer import Tokenizer
from tests.api.conftest import run_greedy
from tests.comparison import compare, reference_tokens
from tests.models.checkpoints import load, make_reference, prompts, save
from tests.models.hybrid_configs import HYBRID_CONFIGS
from tests.tiny import byte_level_tokenizer

NEW_TOKENS = 10
SMALL = {"num_blocks": 13, "block_size": 4, "max_batch_tokens": 16, "max_batch_requests": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch_requests": 1},
    "together": {},
    "chunks of 1": {"max_prefill_tokens": 1, "prefix_caching": False},
    "chunks of 7": {"max_prefill_tokens": 7, "block_size": 4},
    "chunks of 64": {"max_prefill_tokens": 64, "block_size": 4, "num_states": 3},
    "preempted": {**SMALL, "prefix_caching": False},
    "preempted, with snapshots": SMALL,
    "ngram": {"speculate": "ngram", "draft_length": 5, "block_size": 4},
    "padded": {"attention": "padded", "block_size": 4},
}
Hybrid = tuple[LoadedModel, Any]


# Families that have the parts of others; their logits are compared in tests/models/test_families.py.
LIKE_OTHERS = frozenset({"bamba", "granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_next"})


def _cases() -> Iterator[Any]:
    """Every case; those that vary a family that another case has are slow."""
    seen = set(LIKE_OTHERS)
    for name, make in HYBRID_CONFIGS.items():
        family = make().model_type
        yield pytest.param(name, marks=[pytest.mark.slow] if family in seen else [])
        seen.add(family)


@pytest.fixture(scope="module", params=_cases())
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return make_hybrid(HYBRID_CONFIGS[request.param](), tmp_path_factory.mktemp("hybrid"))


def make_hybrid(config: Any, folder: Path) -> Hybrid:
    hf = make_reference(config)
    save(hf, folder)
    return LoadedModel(config.model_type, load(folder), Tokenizer(byte_level_tokenizer()), frozenset()), hf


def start(loaded: LoadedModel, **options: Any) -> Engine:
    """An engine with `num_blocks` KV blocks and `num_states` state slots."""
    model, block_size = loaded.model, options.get("block_size", 16)
    states = options.pop("num_states", 40) * sum(layer.num_bytes for layer in model.recurrent_layers)
    blocks = options.pop("num_blocks", 100) * block_size * bytes_per_token(model.attention_layers, torch.float32)
    config = EngineConfig(device="cpu", dtype="float32", kv_memory=blocks + states, state_memory=states, **options)
    return start_engine(loaded, config).engine


def test_greedy_tokens_equal_transformers(hybrid: Hybrid) -> None:
    loaded, hf = hybrid
    texts = [tokens.tolist() for tokens in prompts(1, 3, 9, 17, 26, 40)]
    texts.append(texts[-1][:9] * 4)  # repeats itself, so that n-grams are drafted
    expected = [reference_tokens(hf, prompt, NEW_TOKENS) for prompt in texts]
    assert len({token for tokens in expected for token in tokens}) > 12, "the tokens vary too little to reveal errors"
    for setting, options in SETTINGS.items():
        engine = start(loaded, **options)
        for round_number in (1, 2):  # the second time with a warm cache
            run = run_greedy(engine, texts, NEW_TOKENS)
            for prompt, expected_tokens, actual in zip(texts, expected, run.outputs, strict=True):
                tie = compare(hf, prompt, expected_tokens, actual)
                assert tie is None, f"{setting}, round {round_number}: {tie}"
        # Without attention there are no blocks to run out of.
        assert run.num_preemptions or not setting.startswith("preempted") or not loaded.model.attention_layers
        hit = any(event.cached_tokens for event in run.events if isinstance(event, RequestAdmitted))
        assert hit or setting not in ("together", "chunks of 7", "ngram")
        assert setting != "ngram" or any(isinstance(event, DraftsVerified) for event in run.events)


def events_of(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    assert engine.fatal is None, engine.fatal
    return events


def outputs(events: list[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, TokenProduced):
            found.setdefault(event.request_id, []).append(event.token)
    return found


@pytest.mark.parametrize("caching", [True, False])
def test_completions_share_the_state_of_their_prompt(hybrid: Hybrid, caching: bool) -> None:
    loaded, hf = hybrid
    (prompt,) = (tokens.tolist() for tokens in prompts(41))
    engine = start(loaded, prefix_caching=caching)
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=3, ignore_eos=True), request_id="a")
    events = events_of(engine)
    expected = reference_tokens(hf, prompt, NEW_TOKENS)
    found = outputs(events)
    assert [compare(hf, prompt, expected, tokens) for tokens in found.values()] == [None] * 3
    admitted = [event.cached_tokens for event in events if isinstance(event, RequestAdmitted)]
    assert admitted == [0, 40, 40]


def test_beams_are_those_of_one_big_step(hybrid: Hybrid) -> None:
    """A search that is preempted, or cut into small steps, finds what it finds with all the memory."""
    loaded, _ = hybrid
    (prompt,) = (tokens.tolist() for tokens in prompts(17))
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, temperature=0.0, ignore_eos=True)
    found = []
    for options in ({}, {"max_prefill_tokens": 3, "block_size": 4, "num_states": 7}, {**SMALL, "num_states": 8}):
        engine = start(loaded, **options)
        engine.submit([*prompt, 5], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), request_id="other")
        engine.submit(prompt, params, request_id="search")
        found.append(outputs(events_of(engine)))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_shared_prefix_of_1000_tokens_is_computed_once(tmp_path: Path) -> None:
    """By three requests that arrive together."""
    config = HYBRID_CONFIGS["qwen3.5"]()
    config.max_position_embeddings = 1100
    loaded, hf = make_hybrid(config, tmp_path)
    shared, *tails = (tokens.tolist() for tokens in prompts(1000, 5, 6, 7))
    engine = start(loaded, block_size=8, num_blocks=200, max_batch_tokens=2048)
    texts = [[*shared, *tail] for tail in tails]
    run = run_greedy(engine, texts, 3)
    steps = [event for event in run.events if isinstance(event, StepDone)]
    assert sum(step.prefill_tokens for step in steps) == 1000 + 5 + 6 + 7
    assert run.outputs[1] == reference_tokens(hf, texts[1], 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"preemption": "swap"}, "preemption: the model has recurrent layers"),
        ({"preemption": "auto", "swap_memory": "1MiB"}, "swap_memory: the model has recurrent layers"),
        ({"speculate": "layers:1"}, "speculate: the model has recurrent layers"),
    ],
)
def test_options_that_need_states_elsewhere_are_refused(hybrid: Hybrid, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        start(hybrid[0], **options)
