"""The default model against transformers, token for token, with every kind of batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.events import PromptPooled, PromptScored, RequestAdmitted
from chairlift.core.plan import TokenLogprobs
from chairlift.engine.startup import LoadedModel, start_engine
from tests.api.beam_reference import check_beams
from tests.api.conftest import Run, run_greedy
from tests.api.prompt_outputs import SCORED, check_embedding, expected_logprobs, pooled
from tests.comparison import check_greedy, reference_tokens
from tests.prompts import CHATS, SHORT, long_text

pytestmark = pytest.mark.model

NEW_TOKENS = 8
SHORT_PROMPT = 100  # longer ones are tested by `make test-all`
ALONE = slice(None, None, 4)  # of the short prompts; `make test-all` runs every prompt alone


@dataclass
class Reference:
    prompts: list[list[int]]
    hf: Any
    good: set[tuple[int, ...]] = field(default_factory=set)  # checked outputs, each preceded by its prompt index

    def check(self, outputs: list[list[int]], prompts: Sequence[int] | None = None) -> None:
        """Compare the outputs of these prompts (by default all) with transformers; print ties."""
        chosen = range(len(self.prompts)) if prompts is None else prompts
        for i, actual in zip(chosen, outputs, strict=True):
            assert len(actual) == NEW_TOKENS
            if (i, *actual) not in self.good:
                for note in check_greedy(self.hf, self.prompts[i], actual):
                    print(note)
                self.good.add((i, *actual))

    def short(self, longest: int) -> list[int]:
        """Return the indices of the prompts up to this length."""
        return [i for i, prompt in enumerate(self.prompts) if len(prompt) <= longest]


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
    return Reference(prompts, hf_default)


def engine_for(loaded: LoadedModel, **options: Any) -> Any:
    options = {"kv_memory": "512MiB", "max_model_len": 2048, **options}
    return start_engine(loaded, EngineConfig(device="cpu", dtype="float32", **options)).engine


def run_and_check(engine: Any, reference: Reference, chosen: Sequence[int]) -> Run:
    run = run_greedy(engine, [reference.prompts[i] for i in chosen], NEW_TOKENS)
    reference.check(run.outputs, chosen)
    return run


def test_the_reference_equals_generate_of_transformers(reference: Reference) -> None:
    for i in (0, 1, 24):
        theirs = reference_tokens(reference.hf, reference.prompts[i], NEW_TOKENS)
        reference.check([theirs], [i])
        for place in range(NEW_TOKENS):
            with pytest.raises(AssertionError, match="transformers has"):
                reference.check([[*theirs[:place], theirs[place] ^ 1, *theirs[place + 1 :]]], [i])


def test_one_request_alone(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model, max_batch_requests=1)
    few = reference.short(SHORT_PROMPT)[ALONE]
    assert len(few) >= 7
    run_and_check(engine, reference, few)


@pytest.mark.slow
def test_every_request_alone(default_model: LoadedModel, reference: Reference) -> None:
    engine = engine_for(default_model, max_batch_requests=1)
    run_and_check(engine, reference, range(len(reference.prompts)))


@pytest.mark.parametrize("longest", [600, pytest.param(1500, marks=pytest.mark.slow)])
def test_all_at_once_with_a_cold_then_a_warm_cache(
    default_model: LoadedModel, reference: Reference, longest: int
) -> None:
    engine = engine_for(default_model)
    few = reference.short(longest)
    run_and_check(engine, reference, few)
    warm = run_and_check(engine, reference, few)
    cached = sum(event.cached_tokens for event in warm.events if isinstance(event, RequestAdmitted))
    assert cached > 0.7 * sum(len(reference.prompts[i]) for i in few)


@pytest.mark.parametrize(
    ("chunk", "longest"), [(1, 10), pytest.param(7, 100, marks=pytest.mark.slow), (64, 160), (512, 600)]
)
def test_chunk_sizes_without_a_prefix_cache(
    default_model: LoadedModel, reference: Reference, chunk: int, longest: int
) -> None:
    engine = engine_for(default_model, max_batch_tokens=640, max_prefill_tokens=chunk, prefix_caching=False)
    few = reference.short(longest)
    assert len(few) >= 7
    run_and_check(engine, reference, few)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_of_every_prompt(default_model: LoadedModel, reference: Reference, chunk: int) -> None:
    engine = engine_for(default_model, max_prefill_tokens=chunk, prefix_caching=False)
    run_and_check(engine, reference, range(len(reference.prompts)))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_with_preemptions(default_model: LoadedModel, reference: Reference, prefix_caching: bool) -> None:
    # With blocks of 2, every request allocates while decoding; the pool just holds the longest request.
    few = reference.short(160)
    assert len(few) >= 30
    options = {"kv_memory": (160 + NEW_TOKENS) * 46_080, "block_size": 2, "prefix_caching": prefix_caching}
    options["max_batch_requests"] = 32  # the default is the number that fits into this pool
    run = run_and_check(engine_for(default_model, **options), reference, few)
    assert run.num_preemptions > 0
    print(f"{run.num_preemptions} preemptions")


@pytest.mark.parametrize(("attention", "longest"), [("bursted", 100), ("padded", 32)])
def test_other_attention_backends_give_the_same_tokens(
    default_model: LoadedModel, reference: Reference, attention: str, longest: int
) -> None:
    engine = engine_for(default_model, attention=attention)
    few = reference.short(longest)
    assert len(few) >= 10
    run_and_check(engine, reference, few)


def test_prompt_outputs(default_model: LoadedModel, hf_default: Any) -> None:
    """Log-probabilities and embeddings of all prompts at once, in chunks."""
    engine = engine_for(default_model, max_prefill_tokens=32)
    prompts = [default_model.tokenizer.encode(text) for text in (*SHORT[:6], *CHATS)]
    ids = [
        [engine.submit(prompt, params)[0] for params in (SCORED, pooled("mean"), pooled("last"))] for prompt in prompts
    ]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    vectors: dict[str, list[float]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, PromptScored):
                logprobs.setdefault(event.request_id, []).extend(event.logprobs)
            elif isinstance(event, PromptPooled):
                vectors[event.request_id] = list(event.vector)
    for prompt, (scored, mean, last) in zip(prompts, ids, strict=True):
        expected = expected_logprobs(hf_default, prompt)
        assert [one.token_id for one in logprobs.get(scored, [])] == prompt[1:]
        for row, one in zip(expected, logprobs.get(scored, []), strict=False):
            assert abs(one.logprob - float(row[one.token_id])) < 1e-3
            assert [value for _, value in one.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
        check_embedding(hf_default, prompt, vectors[mean], "mean")
        check_embedding(hf_default, prompt, vectors[last], "last")


@pytest.mark.usefixtures("one_thread")  # batches are too small for more
def test_beams_of_one_prompt_equal_transformers(default_model: LoadedModel, hf_default: Any) -> None:
    """Here rather than in test_beams.py, because each file in `make test` loads the models anew."""
    check_beams(default_model, hf_default, SHORT[2:3], width=4, new=6)


def test_the_startup_log_in_the_docs_is_that_of_today(default_model: LoadedModel) -> None:
    """With the KV cache of int8, the default on most CPUs."""
    config = EngineConfig(device="cpu", kv_memory="2GiB", max_model_len=2048, kv_dtype="bfloat16")
    _, *cache = start_engine(default_model, config).memory.lines()
    page = Path(__file__).parents[2] / "docs" / "kv-cache.md"
    assert "\n".join(cache) in page.read_text(encoding="utf-8")
