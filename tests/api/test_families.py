"""Tiny checkpoints of every family, and of some that use the fallback, through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.events import RequestAdmitted
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.text.tokenizer import Tokenizer
from tests.api.conftest import run_greedy
from tests.comparison import compare, reference_tokens
from tests.models.checkpoints import load, make_reference, prompts, save
from tests.models.hybrid_configs import HYBRID_CONFIGS
from tests.models.test_fallback import ARCHITECTURES, config_of
from tests.models.test_families import CONFIGS as FAMILIES
from tests.tiny import byte_level_tokenizer

NEW_TOKENS = 10
CASES: dict[str, Any] = {
    **{name: make for name, make in FAMILIES.items() if name not in HYBRID_CONFIGS},  # those are in test_hybrids.py
    **{f"fallback {name}": partial(config_of, name) for name in ARCHITECTURES},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch_requests": 1},
    "together": {},
    "chunks of 1": {"max_prefill_tokens": 1, "prefix_caching": False},
    "chunks of 7": {"max_prefill_tokens": 7, "block_size": 4},
    "preempted": {
        "num_blocks": 13,
        "block_size": 4,
        "max_batch_tokens": 16,
        "max_batch_requests": 6,
        "prefix_caching": False,
    },
    "swapped": {
        "num_blocks": 13,
        "block_size": 4,
        "max_batch_tokens": 16,
        "max_batch_requests": 6,
        "preemption": "swap",
        "swap_memory": "1MiB",
    },
    "bursted": {"attention": "bursted"},
    "padded": {"attention": "padded", "block_size": 4},
}


# Families that have the parts of others; their logits are compared in tests/models/test_families.py.
LIKE_OTHERS = frozenset(
    (
        "arcee",
        "deepseek_v2",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "helium",
        "llama4_text",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "seed_oss",
        "youtu",
    )
)


def _cases() -> Iterator[Any]:
    """Every case; those that vary a family that another case has are slow."""
    seen = set(LIKE_OTHERS)
    for name, make in CASES.items():
        family = make().model_type
        yield pytest.param(name, marks=[pytest.mark.slow] if family in seen else [])
        seen.add(family)


@pytest.mark.parametrize("name", _cases())
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    hf = make_reference(CASES[name]())
    save(hf, tmp_path)
    loaded = LoadedModel(name, load(tmp_path), Tokenizer(byte_level_tokenizer()), frozenset())
    texts = [tokens.tolist() for tokens in prompts(1, 3, 9, 17, 26, 40)]
    expected = [reference_tokens(hf, prompt, NEW_TOKENS) for prompt in texts]
    assert len({token for tokens in expected for token in tokens}) > 8, "the tokens vary too little to reveal errors"
    for setting, options in SETTINGS.items():
        engine = start_engine(loaded, engine_config(loaded, dict(options))).engine
        rounds = 2 if options.get("prefix_caching", True) else 1  # the second time with a warm cache
        for round_number in range(1, rounds + 1):
            run = run_greedy(engine, texts, NEW_TOKENS)
            for prompt, expected_tokens, actual in zip(texts, expected, run.outputs, strict=True):
                tie = compare(hf, prompt, expected_tokens, actual)
                assert tie is None, f"{setting}, round {round_number}: {tie}"
            # Models with windows give blocks back and may have enough of them.
            if setting in ("preempted", "swapped") and not any(layer.window for layer in loaded.model.attention_layers):
                assert run.num_preemptions > 0
        if setting == "together":
            assert any(event.cached_tokens for event in run.events if isinstance(event, RequestAdmitted))


def engine_config(loaded: LoadedModel, options: dict[str, Any]) -> EngineConfig:
    """An engine config with `num_blocks` expressed as `kv_memory`."""
    block_size = options.get("block_size", 16)
    per_token = sum(4 * layer.numbers_per_token for layer in loaded.model.attention_layers)
    num_blocks = options.pop("num_blocks", 100)
    return EngineConfig(device="cpu", dtype="float32", kv_memory=num_blocks * block_size * per_token, **options)
