"""The checks of the GPU tests themselves, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.comparison import reference_tokens
from tests.gpu.greedy import compare_rounded, count_ties, generate, load_tiny
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


def test_recorded_figures_become_tables() -> None:
    rows = [("greedy", {"model": name, "tokens": 3}) for name in ("b", "a")]
    assert show([("other", 1), *rows]) == [
        "",
        "Greedy tokens against transformers, float32",
        "model  tokens",
        "a      3     ",
        "b      3     ",
    ]
