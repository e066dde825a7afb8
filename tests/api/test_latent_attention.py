"""Latent attention through the whole engine: both of its forms, what the cache holds, shared prefixes and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from chairlift.attention.paged import cpu as paged_cpu
from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, StepDone, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, StartedEngine, start_engine
from chairlift.models import describe
from chairlift.text.tokenizer import Tokenizer
from chairlift_lab.common.model_shapes import SHAPES
from tests.api.conftest import run_greedy
from tests.comparison import compare, reference_tokens
from tests.models.checkpoints import load, make_reference, prompts, save
from tests.models.test_families import CONFIGS
from tests.tiny import byte_level_tokenizer

NEW_TOKENS = 10
LENGTHS = (3, 90, 17, 70)


class Checkpoint(NamedTuple):
    loaded: LoadedModel
    reference: Any
    texts: list[list[int]]
    expected: list[list[int]]

    def start(self, **options: Any) -> StartedEngine:
        defaults = {"device": "cpu", "dtype": "float32", "kv_memory": "1MiB", "block_size": 4}
        return start_engine(self.loaded, EngineConfig(**(defaults | options)))

    def check(self, outputs: list[list[int]], what: str) -> None:
        for prompt, expected, actual in zip(self.texts, self.expected, outputs, strict=True):
            tie = compare(self.reference, prompt, expected, actual)
            assert tie is None, f"{what}: {tie}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("deepseek")
    reference = make_reference(CONFIGS["deepseek v3, yarn"]())
    save(reference, folder)
    texts = [tokens.tolist() for tokens in prompts(*LENGTHS)]
    texts[1][40:80] = texts[1][:40]  # something for ngram to find
    loaded = LoadedModel("deepseek", load(folder), Tokenizer(byte_level_tokenizer()), frozenset())
    return Checkpoint(loaded, reference, texts, [reference_tokens(reference, text, NEW_TOKENS) for text in texts])


@pytest.mark.parametrize("pays", [True, False, None], ids=["expanded", "absorbed", "by cost"])
@pytest.mark.parametrize("chunk", [None, 64, 20])
def test_both_forms_equal_transformers(
    checkpoint: Checkpoint, chunk: int | None, pays: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of more than 16 tokens can have either form, also behind tokens that are cached already."""
    if pays is not None:
        monkeypatch.setattr(paged_cpu, "_pays", lambda *arguments: pays)
    expanded: list[tuple[int, int]] = []
    attend = paged_cpu.attend_expanded

    def spied(*arguments: Any) -> torch.Tensor:
        expanded.append(arguments[-2:])
        return attend(*arguments)

    monkeypatch.setattr("chairlift.attention.paged.cpu.attend_expanded", spied)
    monkeypatch.setattr(paged_cpu, "EXPANDED_NUMBERS", 5000)  # several groups of heads
    engine = checkpoint.start(**({} if chunk is None else {"max_prefill_tokens": chunk})).engine
    for what in ("cold", "warm"):
        checkpoint.check(run_greedy(engine, checkpoint.texts, NEW_TOKENS).outputs, what)
    assert bool(expanded) == (pays is not False)
    if pays and chunk == 20:
        assert any(start > 0 for start, _ in expanded)


def test_drafts_and_shared_prompts(checkpoint: Checkpoint) -> None:
    engine = checkpoint.start(speculate="ngram", draft_length=4).engine
    run = run_greedy(engine, checkpoint.texts, NEW_TOKENS)
    checkpoint.check(run.outputs, "ngram")
    assert any(isinstance(event, DraftsVerified) for event in run.events)

    engine = checkpoint.start().engine
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    ids = [engine.submit(prompt, params) for prompt in checkpoint.texts]
    outputs: dict[str, list[int]] = {each: [] for group in ids for each in group}
    computed = 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
            computed += event.prefill_tokens if isinstance(event, StepDone) else 0
    siblings = 2 * len(LENGTHS)  # each starts one token behind
    assert computed == sum(LENGTHS) + siblings, "the completions of a prompt share its blocks"
    for place in range(3):
        checkpoint.check([outputs[group[place]] for group in ids], f"n = 3, completion {place}")


def test_the_cache_holds_one_latent_per_token(checkpoint: Checkpoint) -> None:
    started = checkpoint.start()
    storage = started.runner.storage
    assert storage.keys[0].shape[1:] == (4, 1, 32 + 8)
    assert all(values is keys for keys, values in zip(storage.keys, storage.values, strict=True))
    assert started.memory.bytes_per_token == 3 * (32 + 8) * 4
    stored = sum(tensor.nbytes for tensor in storage.tensors)
    assert stored == (started.memory.num_blocks + 1) * 4 * started.memory.bytes_per_token


V3: dict[str, Any] = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129_280}
V3 |= {"num_attention_heads": 128, "intermediate_size": 18_432, "max_position_embeddings": 163_840}
K2 = V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "vocab_size": 163_840}
K2 |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(V3, 671.0), (K2, 1026.0), (SHAPES["deepseek-v2-lite"], 15.7)],
    ids=["v3", "kimi k2", "v2 lite"],
)
def test_sizes_of_published_models(config: dict[str, Any], billions: float) -> None:
    """The cache of V3 holds 576 numbers per token and layer instead of 40,960."""
    info = describe(config)
    assert info.num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert bytes_per_token(info.attention_layers, torch.bfloat16) == config["num_hidden_layers"] * 576 * 2


def test_tokens_do_not_depend_on_the_batch_in_invariant_mode(tmp_path: Path) -> None:
    reference = make_reference(CONFIGS["deepseek v2 lite"]())
    save(reference, tmp_path)
    model = load(tmp_path, batch_invariant=True)
    loaded = LoadedModel("deepseek", model, Tokenizer(byte_level_tokenizer()), frozenset())
    texts = [tokens.tolist() for tokens in prompts(40, 5, 33)]

    def generate(texts: list[list[int]], **options: Any) -> list[list[tuple[int, float]]]:
        config = EngineConfig(device="cpu", dtype="float32", kv_memory="1MiB", batch_invariant=True, **options)
        engine = start_engine(loaded, config).engine
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
        found: dict[str, list[tuple[int, float]]] = {engine.submit(text, params)[0]: [] for text in texts}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenProduced):
                    assert event.logprobs is not None
                    found[event.request_id].append((event.token, event.logprobs.logprob))
        return list(found.values())

    together = generate(texts, max_prefill_tokens=19, prefix_caching=False)
    assert together == [generate([text], prefix_caching=False)[0] for text in texts]


def test_a_draft_head_is_not_trained(checkpoint: Checkpoint) -> None:
    from chairlift.errors import UnsupportedModel
    from chairlift_lab.training.texts import refuse_unusual_attention

    with pytest.raises(UnsupportedModel, match="latent attention"):
        refuse_unusual_attention(checkpoint.loaded.model.attention_layers)
