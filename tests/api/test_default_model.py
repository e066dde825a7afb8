"""The default model against transformers, token for token, whatever the engine does with its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from chairlift.core.events import RequestBoarded
from chairlift.execution.config import EngineConfig
from chairlift.execution.startup import LoadedModel, start_engine
from tests.api.conftest import run_greedy
from tests.comparison import compare, reference_tokens
from tests.prompts import CHATS, SHORT, long_text

pytestmark = pytest.mark.model

NEW_TOKENS = 12
SHORT_PROMPT = 100  # longer ones are left to `make test-all` where every prompt token is a step of its own


@dataclass
class Reference:
    prompts: list[list[int]]
    tokens: list[list[int]]
    hf: Any

    def check(self, outputs: list[list[int]], prompts: list[int] | None = None) -> None:
        """Compare the outputs of these prompts (all, by default); print ties."""
        chosen = range(len(self.prompts)) if prompts is None else prompts
        for i, actual in zip(chosen, outputs, strict=True):
            note = compare(self.hf, self.prompts[i], self.tokens[i], actual)
            if note:
                print(note)


@pytest.fixture(scope="module")
def reference(default_model: LoadedModel, hf_default: Any) -> Reference:
    tokenizer = default_model.tokenizer
    prompts = [tokenizer.encode(text) for text in SHORT]
    for question in CHATS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    text = tokenizer.encode(long_text())
    prompts += [text[:90], text[90:250], text[250:850], text[300:1800]]
    assert len(prompts) >= 30
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) == 1500
    return Reference(prompts, [reference_tokens(hf_default, prompt, NEW_TOKENS) for prompt in prompts], hf_default)


def engine_for(loaded: LoadedModel, **options: Any) -> Any:
    options = {"kv_memory": "512MiB", "max_model_len": 2048, **options}
    return start_engine(loaded, EngineConfig(device="cpu", dtype="float32", **options)).engine


def test_alone(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model, max_batch_requests=1)
    reference.check(run_greedy(engine, reference.prompts, NEW_TOKENS).outputs)


def test_all_at_once_with_a_cold_then_a_warm_cache(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model)
    cold = run_greedy(engine, reference.prompts, NEW_TOKENS)
    reference.check(cold.outputs)
    warm = run_greedy(engine, reference.prompts, NEW_TOKENS)
    reference.check(warm.outputs)
    cached = sum(event.cached_tokens for event in warm.events if isinstance(event, RequestBoarded))
    assert cached > 0.8 * sum(map(len, reference.prompts))


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_chunk_sizes_without_a_prefix_cache(default_model: LoadedModel, reference: Reference, chunk: int) -> None:
    engine = engine_for(default_model, max_batch_tokens=640, max_prefill_tokens=chunk, prefix_caching=False)
    reference.check(run_greedy(engine, reference.prompts, NEW_TOKENS).outputs)


def test_one_prompt_token_per_step(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model, max_prefill_tokens=1, prefix_caching=False)
    few = [i for i, prompt in enumerate(reference.prompts) if len(prompt) <= SHORT_PROMPT]
    assert len(few) >= 28
    run = run_greedy(engine, [reference.prompts[i] for i in few], NEW_TOKENS)
    reference.check(run.outputs, few)


@pytest.mark.slow
def test_one_prompt_token_per_step_on_every_prompt(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model, max_prefill_tokens=1, prefix_caching=False)
    reference.check(run_greedy(engine, reference.prompts, NEW_TOKENS).outputs)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_with_preemptions(default_model: LoadedModel, reference: Reference, prefix_caching: bool) -> None:
    # Blocks of 2, so that every request needs new ones while it decodes, in a pool that just holds the longest.
    few = [i for i, prompt in enumerate(reference.prompts) if len(prompt) <= 160]
    assert len(few) >= 30
    options = {"kv_memory": (160 + NEW_TOKENS) * 46_080, "block_size": 2, "prefix_caching": prefix_caching}
    options["max_batch_requests"] = 32  # by default there would be no more seats than this pool has room for
    run = run_greedy(engine_for(default_model, **options), [reference.prompts[i] for i in few], NEW_TOKENS)
    reference.check(run.outputs, few)
    assert run.num_preemptions > 0
    print(f"{run.num_preemptions} preemptions")


@pytest.mark.parametrize(("attention", "longest"), [("bursted", 160), ("padded", 32)])
def test_other_attention_gives_the_same_tokens(
    default_model: LoadedModel, reference: Reference, attention: str, longest: int
) -> None:
    engine = engine_for(default_model, attention=attention)
    few = [i for i, prompt in enumerate(reference.prompts) if len(prompt) <= longest]
    assert len(few) >= 10
    reference.check(run_greedy(engine, [reference.prompts[i] for i in few], NEW_TOKENS).outputs, few)
