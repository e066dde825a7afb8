"""Tiers through the whole engine: whatever is evicted, loaded, damaged or restarted, the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.core.events import RequestAdmitted, RequestPreempted
from chairlift.core.integrity import check_quiescent
from chairlift.core.kv.loads import always_load
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK = 4
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4  # two layers, keys and values, two heads of 16, float32
PROMPTS = [[(7 * i + 3 * j + 1) % 300 for j in range(40 + 5 * i)] for i in range(6)]
PROMPTS.append(PROMPTS[0][:9] * 5)  # repeats itself, so that n-grams are drafted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@contextmanager
def opened(checkpoint: str, num_blocks: int = 24, **options: Any) -> Iterator[LLM]:
    llm = LLM(
        checkpoint,
        progress=False,
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        kv_memory=num_blocks * BLOCK_BYTES,
        **options,
    )
    loads = llm.engine.scheduler.kv.loads
    if loads is not None:
        loads._compute_seconds = always_load  # Computing with so small a model may be faster.
    try:
        yield llm
    finally:
        llm.close()


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    check_quiescent(llm.engine.scheduler)
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[list[int]]:
    with opened(checkpoint, 400, prefix_caching=False) as llm:
        return tokens(llm)


SETTINGS: dict[str, dict[str, Any]] = {
    "host memory": {"kv_host_memory": 200 * BLOCK_BYTES},
    "tiny tiers": {"kv_host_memory": 3 * BLOCK_BYTES, "kv_disk_size": 40 * BLOCK_BYTES},
    "disk, chunks and drafts": {
        "max_prefill_tokens": 7,
        "speculate": "ngram",
        "draft_length": 4,
        "kv_disk_size": 10**6,
    },
    "preempted, both tiers": {"num_blocks": 34, "kv_host_memory": 20 * BLOCK_BYTES, "kv_disk_size": 10**6},
    "with room to swap": {"num_blocks": 34, "kv_host_memory": 200 * BLOCK_BYTES, "preemption": "swap"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_a_cold_cache(
    checkpoint: str, expected: list[list[int]], tmp_path: Path, setting: str
) -> None:
    options = dict(SETTINGS[setting])
    if "kv_disk_size" in options:
        options["kv_disk"] = tmp_path
    with opened(checkpoint, **options) as llm:
        events = []
        llm.engine.subscribe(lambda some: events.extend(some))
        for _ in range(2):  # There and back, so that tiers which are too small for all have some of it.
            assert tokens(llm) == expected
            assert tokens(llm, PROMPTS[::-1]) == expected[::-1]
        tiers = llm.engine.scheduler.kv.tiers
        assert tiers is not None
        assert sum(tiers.loaded_bytes.values()) > 0
        preempted = any(isinstance(event, RequestPreempted) for event in events)
        assert preempted or setting != "preempted, both tiers"


def test_a_restart_knows_the_conversation(checkpoint: str, expected: list[list[int]], tmp_path: Path) -> None:
    for start in range(3):
        with opened(checkpoint, 100, kv_disk=tmp_path) as llm:
            events: list[Any] = []
            llm.engine.subscribe(lambda some, events=events: events.extend(some))
            assert tokens(llm, PROMPTS[:2]) == expected[:2]
            cached = [event.cached_tokens for event in events if isinstance(event, RequestAdmitted)]
            assert cached == ([0, 0] if start == 0 else [36, 44])


def test_other_weights_options_and_salts_find_nothing(
    checkpoint: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def cached(prompt: Any, model: str = checkpoint, **options: Any) -> int:
        with opened(model, 100, kv_disk=tmp_path, **options) as llm:
            found: list[Any] = []
            llm.engine.subscribe(found.extend)
            llm.generate([prompt], GREEDY, use_tqdm=False)
            return sum(event.cached_tokens for event in found if isinstance(event, RequestAdmitted))

    prompt = PROMPTS[0]
    assert cached(prompt) == 0
    assert cached({"prompt_token_ids": prompt, "cache_salt": "another key"}) == 0
    assert cached({"prompt_token_ids": prompt, "cache_salt": "another key"}) == 36
    assert cached(prompt, speculate="ngram") == 0
    other = write_tiny_checkpoint(tmp_path_factory.mktemp("other"), positions=255)
    assert cached(prompt, str(other)) == 0
    assert cached(prompt) == 36


def test_damaged_files_change_no_token(checkpoint: str, expected: list[list[int]], tmp_path: Path) -> None:
    rng = random.Random(0)
    with opened(checkpoint, 100, kv_disk=tmp_path) as llm:
        assert tokens(llm) == expected
    for path in sorted(tmp_path.rglob("*.kv")):
        content = bytearray(path.read_bytes())
        damage = rng.choice(["none", "none", "bit", "cut", "swap", "gone"])
        if damage == "bit":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif damage == "cut":
            del content[rng.randrange(len(content)) :]
        elif damage == "swap":
            content = bytearray(rng.choice(sorted(tmp_path.rglob("*.kv"))).read_bytes())
        path.write_bytes(content)
        if damage == "gone":
            path.unlink()
    with opened(checkpoint, 30, kv_disk=tmp_path) as llm:
        for _ in range(2):
            assert tokens(llm) == expected
        assert llm.engine.scheduler.kv.tiers is not None
        assert llm.engine.scheduler.kv.tiers.num_lost["disk"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_host_memory": 100}, "kv_host_memory: is too little: one block takes"),
        ({"kv_host_memory": "900TiB"}, "kv_host_memory: .* is more than the .* that are free"),
        ({"kv_disk_size": "1GiB"}, "kv_disk_size: needs a folder"),
        ({"kv_disk": "", "kv_disk_size": "1GiB"}, "kv_disk: must be a folder"),
        ({"kv_disk": "/dev/null/x"}, "kv_disk: "),
        ({"kv_host_memory": "1MiB", "prefix_caching": False}, "kv_host_memory: needs prefix_caching"),
    ],
)
def test_options_that_cannot_be(checkpoint: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message), opened(checkpoint, **options):
        pass
