"""The checks of the GPU tests themselves, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.comparison import compare, reference_tokens
from tests.gpu.greedy import compare_rounded, count_ties, generate, load_tiny
from tests.gpu.references import (
    NAMES,
    NOT_CACHED,
    UNLIKE_PUBLISHED,
    OwnReference,
    difference_of,
    saved_reference,
)
from tests.gpu.table import show
from tests.models.checkpoints import make_reference, prompts, save
from tests.models.test_families import CONFIGS


def test_only_near_ties_pass_as_rounding(tmp_path: Path) -> None:
    hf = make_reference(CONFIGS["qwen2"]()).bfloat16()
    save(hf, tmp_path)
    asked = [tokens.tolist() for tokens in prompts(9, 17)]
    run = generate(load_tiny(tmp_path, torch.device("cpu"), torch.bfloat16), asked, 30)
    found = compare_rounded(hf, asked, run.outputs)
    assert found.tokens == 60
    assert found.noise > 0
    assert found.all_near_ties
    wrong = [[*output[:-1], (output[-1] + 1) % 211] for output in run.outputs]
    assert not compare_rounded(hf, asked, wrong).all_near_ties


@pytest.mark.parametrize("name", ["llama gqa", "qwen2", "gemma2"])
def test_greedy_tokens_have_no_ties_on_a_cpu(name: str, tmp_path: Path) -> None:
    hf = make_reference(CONFIGS[name]())
    save(hf, tmp_path)
    asked = [tokens.tolist() for tokens in prompts(3, 17, 26)]
    expected = [reference_tokens(hf, prompt, 16) for prompt in asked]
    loaded = load_tiny(tmp_path, torch.device("cpu"), torch.float32)
    assert count_ties(hf, asked, expected, generate(loaded, asked, 16).outputs) == 0


@pytest.mark.parametrize("name", [*UNLIKE_PUBLISHED, *NOT_CACHED])
def test_families_that_an_old_transformers_computes_otherwise_have_another_reference(name: str, tmp_path: Path) -> None:
    """It gives the tokens of a transformers that computes them as published."""
    cpu, old = torch.device("cpu"), saved_reference(name, tmp_path / "old", torch.device("cpu"), "5.17.0")
    assert isinstance(old, OwnReference) == (name in UNLIKE_PUBLISHED)
    prompt = prompts(9)[0].tolist()
    tokens = reference_tokens(old, prompt, 12)
    hf = saved_reference(name, tmp_path / "new", cpu, "5.23.0")
    if difference_of(name) is None:
        assert compare(hf, prompt, reference_tokens(hf, prompt, 12), tokens) is None
    loaded = load_tiny(tmp_path / "old", cpu, torch.float32)
    assert count_ties(old, [prompt], [tokens], generate(loaded, [prompt], 12).outputs) == 0


def test_reasons_why_transformers_is_no_reference() -> None:
    assert difference_of("bamba", "5.17.0") == (
        "transformers 5.17.0 norms all groups of Mamba 2 heads together, not each by itself as the published models do"
    )
    assert difference_of("bamba", "5.23.0") is None
    assert difference_of("llama gqa", "5.17.0") is None
    assert sorted(NAMES) == sorted(CONFIGS)


def test_recorded_figures_become_tables() -> None:
    rows = [("greedy", {"model": name, "tokens": 3}) for name in ("b", "a")]
    assert show([("other", 1), *rows]) == [
        "",
        "Greedy tokens against transformers, float32",
        "model  tokens",
        "a      3     ",
        "b      3     ",
    ]
