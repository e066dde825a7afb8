"""Adapters in the engine: every request has its own, whatever else is in its steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, InvalidParameter, LoRARequest, SamplingParams
from chairlift.core.adapters import AdapterStatus
from chairlift.core.integrity import check_accounting
from chairlift.core.request import FinishReason
from chairlift.errors import ChairliftError
from tests.adapters import merge, write_canary, write_random
from tests.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RANKS = {"four": 4, "eight": 8, "many": 64}
PROMPTS = ["a chairlift never stops", "blocks are shared, copied on write and freed in the same step", "ragged"]
SLOW = ("bfloat16", "int4")  # Their kernels take long to compile.
PAIRS = [(prompt, name) for prompt in PROMPTS for name in (None, *RANKS)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {
        name: write_random(base.parent / name, base, rank, seed=rank, scale=0.5 * rank**-0.25)
        for name, rank in RANKS.items()
    }


def make(base: Path, adapters: dict[str, Path], **options: Any) -> LLM:
    options = {"dtype": "float32", "quantization": "none", "kv_memory": "16MiB", "seed": 0} | options
    return LLM(str(base), progress=False, lora={name: str(path) for name, path in adapters.items()}, **options)


def tokens(llm: LLM, prompts: list[str], lora: Any = None, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    results = llm.generate(prompts, params, lora=lora, use_tqdm=False)
    check_accounting(llm.engine.scheduler)
    return [[list(output.token_ids) for output in result.outputs] for result in results]


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, Path]) -> dict[tuple[str, str | None], list[list[int]]]:
    """What each adapter says when it is merged into the weights."""
    said = {}
    for name in (None, *RANKS):
        folder = base if name is None else merge(base.parent / f"merged-{name}", base, {adapters[name]: 1.0})
        with LLM(str(folder), progress=False, dtype="float32", quantization="none", kv_memory="16MiB") as llm:
            said |= {(prompt, name): out for prompt, out in zip(PROMPTS, tokens(llm, PROMPTS), strict=True)}
    assert len({str(out) for out in said.values()}) == len(said), "the adapters change what the model says"
    return said


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prefill_tokens": 5, "max_batch_tokens": 12, "max_batch_requests": 12},
        {"kv_memory": "24KiB", "max_batch_requests": 12},
        {"kv_memory": "24KiB", "max_batch_requests": 12, "preemption": "swap", "swap_memory": "1MiB"},
        {"speculate": "ngram", "draft_length": 3},
        {"speculate": "layers:1", "draft_length": 2},
        {"attention": "padded"},
        {"max_loras": 1},
        {"batch_invariant": True},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "default",
)
def test_a_mixed_batch_says_what_merged_weights_say(
    options: dict[str, Any],
    base: Path,
    adapters: dict[str, Path],
    expected: dict[tuple[str, str | None], list[list[int]]],
) -> None:
    with make(base, adapters, **options) as llm:
        said = tokens(llm, [prompt for prompt, _ in PAIRS], [name for _, name in PAIRS])
        assert said == [expected[pair] for pair in PAIRS]
        # A second time with the prefix cache full.
        again = tokens(llm, [prompt for prompt, _ in reversed(PAIRS)], [name for _, name in reversed(PAIRS)])
        assert again == [expected[pair] for pair in reversed(PAIRS)]


def test_several_completions_and_beams(base: Path, adapters: dict[str, Path]) -> None:
    name, prompt = "eight", PROMPTS[1]
    merged = merge(base.parent / "merged-beams", base, {adapters[name]: 1.0})
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    beams = SamplingParams(n=3, beam_width=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(merged), progress=False, dtype="float32", quantization="none", kv_memory="16MiB") as llm:
        wanted = tokens(llm, [prompt], None, sampled) + tokens(llm, [prompt], None, beams)
    with make(base, adapters) as llm:
        mixed = llm.generate([prompt] * 3, sampled, lora=[None, name, "four"], use_tqdm=False)
        said = [[list(output.token_ids) for output in mixed[1].outputs], *tokens(llm, [prompt], name, beams)]
    assert said == wanted


@pytest.mark.parametrize("quantization", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_other_formats_add_the_same_terms(quantization: str, base: Path, adapters: dict[str, Path]) -> None:
    """A row says the same alone and in a mixed batch, and its adapter counts: a zero weight is the base model."""
    try:
        llm = make(base, adapters, quantization=quantization)
    except ChairliftError as error:
        pytest.skip(str(error))
    with llm:
        mixed = tokens(llm, [prompt for prompt, _ in PAIRS], [name for _, name in PAIRS])
        alone = [tokens(llm, [prompt], name)[0] for prompt, name in PAIRS]
        without = tokens(llm, PROMPTS, {"four": 0.0})
    assert mixed == alone
    assert without == [out for (_, name), out in zip(PAIRS, mixed, strict=True) if name is None]
    assert len({str(out) for out in mixed}) == len(mixed)


def test_weighted_adapters_add_up(base: Path, adapters: dict[str, Path]) -> None:
    weights = {"four": 0.5, "eight": -0.75}
    merged = merge(base.parent / "merged-both", base, {adapters[name]: weight for name, weight in weights.items()})
    with LLM(str(merged), progress=False, dtype="float32", quantization="none", kv_memory="16MiB") as llm:
        wanted = tokens(llm, PROMPTS)
    with make(base, adapters) as llm:
        assert tokens(llm, PROMPTS, weights) == wanted
        for lora, problem in (({"four": float("nan")}, "must be a number"), ({"five": 1}, "no adapter 'five'")):
            with pytest.raises(InvalidParameter, match=problem):
                tokens(llm, PROMPTS, lora)
        with pytest.raises(InvalidParameter, match="2 given for 3 prompts"):
            tokens(llm, PROMPTS, ["four", None])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_no_canary_sings_in_the_request_of_another(quantization: str, base: Path) -> None:
    """600 requests with canaries among others, with more adapters than there is room for."""
    chosen = range(20, 60)
    canaries = {f"canary-{token}": write_canary(base.parent / f"canary-{token}", base, token) for token in chosen}
    generator = random.Random(3)
    words = ["a", "chairlift", "never", "stops", "for", "boarding", "and", "neither", "does", "the", "engine"]
    requests = [
        (" ".join(generator.choices(words, k=generator.randint(1, 12))), generator.choice([None, *canaries]))
        for _ in range(615)
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=generator.randint(1, 5), ignore_eos=True) for _ in requests]
    with make(base, canaries, quantization=quantization, max_loras=8, kv_memory="1MiB") as llm:
        results = llm.generate(
            [prompt for prompt, _ in requests], params, lora=[name for _, name in requests], use_tqdm=False
        )
        pool = llm.engine.scheduler.adapters
        assert len(pool.in_memory) <= 8
        assert pool.num_evictions > 0
    num_canaries = 0
    for (_, name), result in zip(requests, results, strict=True):
        said = set(result.outputs[0].token_ids)
        if name is None:
            assert not said <= set(chosen)
        else:
            num_canaries += 1
            assert said == {int(name.removeprefix("canary-"))}
    assert num_canaries >= 580


def test_an_adapter_is_replaced_and_removed_under_traffic(base: Path) -> None:
    first, second = (write_canary(base.parent / f"replaced-{token}", base, token) for token in (70, 71))
    with make(base, {}, max_loras=2) as llm:
        engine = llm.engine
        llm.load_lora("bird", str(first))
        prompt, finished = llm.get_tokenizer().encode(PROMPTS[1]), {}
        said: dict[str, list[int]] = {}

        def step() -> None:
            for event in engine.step():
                if hasattr(event, "token"):
                    said.setdefault(event.request_id, []).append(event.token)
                if hasattr(event, "ending"):
                    finished[event.request_id] = event.ending.reason
            check_accounting(engine.scheduler)

        engine.submit(prompt, GREEDY, request_id="old", lora="bird")
        while len(said.get("old", ())) < 3:
            step()
        llm.load_lora("bird", str(second))
        engine.submit(prompt, GREEDY, request_id="new", lora="bird")
        while len(said.get("new", ())) < 3:
            step()
        llm.unload_lora("bird")
        with pytest.raises(InvalidParameter, match="no adapter 'bird'"):
            engine.submit(prompt, GREEDY, lora="bird")
        while engine.has_work:
            step()
        assert set(said["old"]) == {70}
        assert set(said["new"]) == {71}
        assert set(finished.values()) == {FinishReason.LENGTH}
        assert not engine.scheduler.adapters.in_memory, "nothing can ask for them any more"
        llm.generate(PROMPTS[0], GREEDY, lora=LoRARequest("bird", 1, str(first)), use_tqdm=False)
        assert llm.loras == ["bird"]


def test_a_folder_that_changes_ends_its_requests_only(base: Path) -> None:
    folder = write_canary(base.parent / "changing", base, 80)
    with make(base, {"bird": folder}) as llm:
        write_canary(folder, base, 81)
        results = llm.generate(PROMPTS[:2], GREEDY, lora=["bird", None], use_tqdm=False)
        assert results[0].outputs[0].finish_reason == "error"
        assert len(results[1].outputs[0].token_ids) == 12
        (adapter,) = llm.engine.scheduler.adapters.registered
        assert adapter.status is AdapterStatus.REGISTERED
        llm.load_lora("bird", str(folder))
        assert set(tokens(llm, [PROMPTS[0]], "bird")[0][0]) == {81}


def test_a_prefix_is_shared_only_under_the_same_adapter(base: Path, adapters: dict[str, Path]) -> None:
    prompt = " ".join(PROMPTS) * 3
    with make(base, adapters) as llm:
        cached = [
            llm.generate(prompt, GREEDY, lora=lora, use_tqdm=False)[0].cached_tokens
            for lora in ("four", "eight", None, "four", {"four": 1.0}, {"four": 0.5})
        ]
    assert [bool(count) for count in cached] == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lora_memory": "1KiB"}, "lora_memory"),
        ({"lora": ["twice=a", "twice=b"]}, "more than once"),
        ({"lora": {"": "a"}}, "NAME=PATH"),
        ({"lora": "four"}, "mapping of names"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], problem: str, base: Path, adapters: dict[str, Path]) -> None:
    given = {"lora": {"four": str(adapters["four"])}} | options
    with pytest.raises(InvalidParameter, match=problem):
        LLM(str(base), progress=False, dtype="float32", **given)


def test_an_engine_without_adapters_names_the_options(base: Path) -> None:
    with LLM(str(base), progress=False, dtype="float32", kv_memory="16MiB") as llm:
        with pytest.raises(InvalidParameter, match="start it with lora or max_loras"):
            llm.generate("a", GREEDY, lora="four")
        with pytest.raises(InvalidParameter, match="start it with lora or max_loras"):
            llm.load_lora("four", "a")
