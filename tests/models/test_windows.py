"""Families whose layers see a window or a chunk: greedy tokens and beams as transformers, whatever is released."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.attention.placement import place_layers
from chairlift.config import EngineConfig
from chairlift.core.events import RequestAdmitted, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_accounting, check_plan, check_shared_prefixes
from chairlift.core.kv.windowed_cache import GroupedCache, WindowedCache
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.models import describe
from tests.models.checkpoints import VOCAB, make_reference, save
from tests.models.greedy_everywhere import greedy
from tests.models.test_families import CONFIGS
from tests.tiny import byte_level_tokenizer

BLOCK_SIZE = 4
COUNT = 14
GROUPED = ("gemma3", "gpt oss", "llama4", "mistral")  # Others are slow tests: their accounting is the same.


def windowed_configs() -> list[Any]:
    """The tiny configs of which some layer does not see everything."""
    names = []
    for name, make in CONFIGS.items():
        layers = describe(make().to_dict()).attention_layers
        if any(layer.window or layer.chunk for layer in layers):
            names.append(pytest.param(name, marks=() if name in GROUPED else pytest.mark.slow))
    return names


class Checkpoint:
    def __init__(self, name: str, folder: Path) -> None:
        self.reference = make_reference(CONFIGS[name]())
        config = save(self.reference, folder)
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        layers = describe(config).attention_layers
        self.placement = place_layers(layers, 128)
        self.reach = min(layer.window or layer.chunk or 128 for layer in layers)
        self.loaded = load_model(str(folder), EngineConfig(device="cpu", dtype="float32"), progress=False)
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: list[int]) -> list[int]:
        if tuple(prompt) not in self._greedy:
            self._greedy[tuple(prompt)] = greedy(self.reference, prompt, COUNT)
        return self._greedy[tuple(prompt)]


class Run:
    """An engine that is checked in every step, and the tokens and events of what it computed."""

    def __init__(self, loaded: LoadedModel, placement: Any, *, blocks: int = 160, **options: Any) -> None:
        room = blocks * BLOCK_SIZE * bytes_per_token(placement.shapes, torch.float32)
        base = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "kv_memory": room, "max_model_len": 128}
        self.engine = start_engine(loaded, EngineConfig(**(base | options))).engine
        self.preempted = 0
        self.cached: dict[str, int] = {}

    def tokens(self, prompts: list[list[int]], urgent_after: int = 0, **params: Any) -> list[list[int]]:
        """The tokens of these prompts; with `urgent_after` so many steps, each takes the slot of the one before."""
        given = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, **params)
        outputs: dict[str, list[int]] = {}
        waiting, steps = list(prompts), 0
        scheduler = self.engine.scheduler
        schedule = scheduler.schedule

        def checked(now: float) -> Any:
            plan = schedule(now)
            check_accounting(scheduler)
            check_plan(scheduler, plan)
            return plan

        scheduler.schedule = checked  # type: ignore[method-assign]
        while waiting or self.engine.has_work:
            while waiting and steps >= urgent_after * (len(prompts) - len(waiting)):
                names = self.engine.submit(waiting.pop(0), given, priority=len(waiting) if urgent_after else 0)
                outputs |= {name: [] for name in names}
            steps += 1
            for event in self.engine.step():
                if isinstance(event, TokenProduced):
                    outputs[event.request_id].append(event.token)
                if isinstance(event, RequestAdmitted):
                    self.cached.setdefault(event.request_id, event.cached_tokens)
                self.preempted += isinstance(event, RequestPreempted)
            check_accounting(scheduler)
            check_shared_prefixes(scheduler)
        scheduler.schedule = schedule  # type: ignore[method-assign]
        assert scheduler.kv.num_free == scheduler.kv.num_blocks
        return list(outputs.values())


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("name", windowed_configs())
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    prompts = [random_prompt(length, length) for length in (3, 70, 33)]
    expected = [checkpoint.expected(prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 5, "a model that repeats a token shows no bug"

    def run(**options: Any) -> Run:
        return Run(checkpoint.loaded, checkpoint.placement, **options)

    for options in (
        *({"max_prefill_tokens": count} for count in (1, 7, 64)),
        {"prefix_caching": False},
        {"speculate": "ngram"},
        {"attention": "padded"},
        {"attention": "bursted"},
    ):
        assert run(**options).tokens(prompts) == expected, options
    assert run().tokens(prompts, n=3) == [tokens for tokens in expected for _ in range(3)], "n = 3"

    warm = run(max_prefill_tokens=7)
    grouped = isinstance(warm.engine.scheduler.kv, GroupedCache | WindowedCache)
    assert grouped == (len(checkpoint.placement.reaches) > 1 or not checkpoint.placement.reaches[0].is_full)
    for _ in range(2):
        assert warm.tokens(prompts) == expected, "warm"
    longest, reach = prompts[1], checkpoint.reach
    following = [*longest, *expected[1], 5, 6]
    assert warm.tokens([following]) == [checkpoint.expected(following)]
    assert list(warm.cached.values())[-1] >= len(longest) + COUNT - BLOCK_SIZE, "the next turn finds the history"
    # Others share a part of the long prompt.
    for shared in (1, reach - 1, reach, reach + 1, 2 * reach + 3, 40, 69, 70):
        prompt = [*longest[:shared], *random_prompt(9, shared)]
        assert warm.tokens([prompt]) == [checkpoint.expected(prompt)], f"a hit of {shared} tokens"

    swap = {"preemption": "swap", "swap_memory": "1MiB"}
    for options in ({"prefix_caching": False}, swap, swap | {"speculate": "ngram"}):
        one = {"max_batch_requests": 1, "order": "priority", "priority_takes_slots": True, "max_prefill_tokens": 16}
        urgent = run(**one, **options)
        assert urgent.tokens(prompts[1:], urgent_after=8) == expected[1:], f"preempted, {options}"
        assert urgent.preempted


@pytest.mark.parametrize("name", windowed_configs())
def test_beams_equal_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(name, tmp_path)
    prompts = [random_prompt(30, seed) for seed in range(2)]
    preempting = {"order": "priority", "priority_takes_slots": True, "max_batch_requests": 3, "prefix_caching": False}
    for steps, options in ((0, {}), (9, preempting)):
        run = Run(checkpoint.loaded, checkpoint.placement, max_prefill_tokens=16, **options)
        found = run.tokens(prompts, urgent_after=steps, beam_width=3, n=3)
        assert bool(run.preempted) == bool(steps)
        for index, prompt in enumerate(prompts):
            wanted = checkpoint.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=COUNT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found[3 * index : 3 * index + 3] == wanted[:, len(prompt) :].tolist()
