"""A KV cache of 8-bit integers: tokens equal those of a model that rounds keys and values, in all uses of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import StepBatch
from chairlift.config import EngineConfig
from chairlift.core.events import (
    DraftsVerified,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenProduced,
)
from chairlift.core.integrity import check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from tests.models.dense_attend import DenseCache
from tests.tiny import write_tiny_checkpoint

BLOCK_SIZE, COUNT = 4, 12
PROMPTS = [[3 + (17 * i + 5 * j) % (40 + i) for j in range(length)] for i, length in enumerate((1, 9, 23, 40, 16))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Batches are too small for more threads."""


class RoundedCache(DenseCache):
    """Rounds keys and values to 8 bits, with a scale for each token and head."""

    def _store(self, key: tuple[int, str], length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super()._store(key, length, self._round(k), self._round(v))

    def _round(self, numbers: Tensor) -> Tensor:
        scale = numbers.abs().amax(dim=-1, keepdim=True) / 127
        return (numbers / scale).round() * scale


@pytest.fixture(scope="module", params=[16, 64], ids=lambda size: f"heads of {size}")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With AVX-512 VNNI, heads of 64 are multiplied as integers."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("int8") / "tiny", head_dim=request.param)
    return load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)


@torch.inference_mode()
def logits(loaded: LoadedModel, tokens: Sequence[int], cache: type[DenseCache] = RoundedCache) -> Tensor:
    attend = cache().step([("only", len(tokens))])
    model = loaded.model
    batch = StepBatch(torch.tensor(tokens), torch.arange(len(tokens)))
    return model.logits(model.hidden_states(batch, attend).last)


def greedy(loaded: LoadedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(logits(loaded, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    return [greedy(loaded, prompt) for prompt in PROMPTS]


def run(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    params: SamplingParams = GREEDY,
    *,
    blocks: int = 256,
    rounds: int = 1,
    **options: Any,
) -> tuple[list[list[int]], list[Event]]:
    """The tokens of every output of the last round, and all events."""
    room = blocks * BLOCK_SIZE * bytes_per_token(loaded.model.attention_layers, torch.int8)
    base = {"device": "cpu", "dtype": "float32", "kv_dtype": "int8", "block_size": BLOCK_SIZE, "kv_memory": room}
    started = start_engine(loaded, EngineConfig(**(base | options)))
    assert started.memory.num_blocks == blocks
    engine, events = started.engine, []
    for _ in range(rounds):
        outputs: dict[str, list[int]] = {one: [] for prompt in prompts for one in engine.submit(prompt, params)}
        while engine.has_work:
            for event in engine.step():
                events.append(event)
                if isinstance(event, TokenProduced):
                    outputs[event.request_id].append(event.token)
    assert engine.fatal is None
    check_quiescent(engine.scheduler)
    return list(outputs.values()), events


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_requests": 1},
        {"attention": "ragged"},
        {"attention": "padded"},
        {"attention": "bursted"},
        {"max_prefill_tokens": 1},
        {"max_prefill_tokens": 7},
    ],
    ids=["alone", "ragged", "padded", "bursted", "chunks of 1", "chunks of 7"],
)
def test_greedy_tokens(loaded: LoadedModel, expected: list[list[int]], options: dict[str, Any]) -> None:
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that repeats a token shows no bug"
    assert run(loaded, PROMPTS, **options)[0] == expected


def test_the_rounding_changes_the_results(loaded: LoadedModel) -> None:
    """Otherwise the other tests would not notice if nothing was rounded."""
    tokens = PROMPTS[3]
    assert (logits(loaded, tokens) - logits(loaded, tokens, DenseCache)).abs().max() > 1e-3


def test_cached_prefixes(loaded: LoadedModel, expected: list[list[int]]) -> None:
    outputs, events = run(loaded, PROMPTS, rounds=2)
    assert any(event.cached_tokens for event in events if isinstance(event, RequestAdmitted))
    assert outputs == expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests(loaded: LoadedModel, mode: str) -> None:
    prompts = [PROMPTS[3][i : i + 1 + 11 * i % 37] for i in range(6)]
    options = {"swap_memory": "1MiB"} if mode == "swap" else {}
    outputs, events = run(loaded, prompts, blocks=16, max_batch_requests=5, preemption=mode, **options)
    preempted = [event for event in events if isinstance(event, RequestPreempted)]
    assert preempted
    assert all(event.swapped == (mode == "swap") for event in preempted)
    assert outputs == [greedy(loaded, prompt) for prompt in prompts]


def test_several_outputs_share_and_copy_blocks(loaded: LoadedModel, expected: list[list[int]]) -> None:
    outputs, _ = run(loaded, PROMPTS, GREEDY.clone(n=3))
    assert outputs == [tokens for tokens in expected for _ in range(3)]


def test_rejected_drafts_are_overwritten(loaded: LoadedModel, expected: list[list[int]]) -> None:
    outputs, events = run(loaded, PROMPTS, speculate="ngram", draft_length=4)
    assert any(event.accepted < event.proposed for event in events if isinstance(event, DraftsVerified))
    assert outputs == expected


def test_beams_have_the_scores_of_the_rounded_model(loaded: LoadedModel) -> None:
    """Beams copy blocks, with their scales, whenever they part."""
    params = SamplingParams(beam_width=4, n=4, max_tokens=8, length_penalty=0.0, ignore_eos=True)
    for prompt in PROMPTS[1:4]:
        found, events = run(loaded, [prompt], params)
        scores = [event.score for event in events if isinstance(event, RequestFinished) and event.score is not None]
        assert len({tuple(tokens) for tokens in found}) == 4
        own = []
        for tokens in found:
            steps = logits(loaded, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(dim=-1)
            own.append(float(steps[torch.arange(len(tokens)), tokens].sum()))
        assert sorted(scores) == pytest.approx(sorted(own), abs=1e-3)
