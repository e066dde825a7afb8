"""Formats and backends from outside the package have adapters, though they have no line about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from chairlift.attention.backends import BACKENDS
from chairlift.layers.formats import FORMATS
from tests.adapters import write_canary
from tests.extending.pages import load_toy

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPTS = ["a chairlift never stops", "ragged"]


def test_toys_run_with_adapters(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, FORMATS, "int4_rows.py")
    load_toy(monkeypatch, BACKENDS, "dense_attention.py")
    canary = write_canary(tmp_path / "canary", checkpoint, 40)
    options = {"quantization": "int4-rows", "attention": "dense", "device": "cpu", "kv_memory": "4MiB"}
    with LLM(str(checkpoint), progress=False, **options) as llm:
        alone = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with LLM(str(checkpoint), progress=False, lora={"canary": str(canary)}, **options) as llm:
        lora = [None, None, "canary", "canary"]
        results = llm.generate(PROMPTS * 2, GREEDY, lora=lora, use_tqdm=False)
    said = [result.outputs[0].token_ids for result in results]
    assert said[:2] == alone
    assert [set(tokens) for tokens in said[2:]] == [{40}] * 2
