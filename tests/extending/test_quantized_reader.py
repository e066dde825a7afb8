"""A reader of quantized checkpoints from outside the package is found by the method's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.quantized import READERS
from tests.extending.pages import load_toy, page_shows, run_with_plugin
from tests.loading.quantized_writing import Parts, Scheme, write_quantized

TOY = "ternary_reader.py"
PROGRAM = """
import sys
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], quantization="none", device="cpu", kv_memory="4MiB", progress=False)
print(*llm.generate("blocks", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
"""


def ternary(weight: np.ndarray, random: np.random.Generator) -> tuple[Parts, np.ndarray]:
    scale = np.float32(np.abs(weight).mean())
    codes = (np.clip(np.round(weight / scale), -1, 1) + 1).astype(np.uint8)
    return {"codes": torch.from_numpy(codes), "scale": torch.tensor([scale])}, (codes.astype(float) - 1) * scale


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_quantized(tmp_path / "model", Scheme({"quant_method": "ternary"}, ternary))
    return tmp_path / "model"


def test_a_toy_reader_reads_a_checkpoint(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="quantized by 'ternary'"):
        open_checkpoint(model)
    load_toy(monkeypatch, READERS, TOY)
    checkpoint = open_checkpoint(model)
    assert checkpoint.quantization == "ternary weights"
    plain = dict(open_checkpoint(model.with_name("model-plain")).tensors())
    for name, tensor in checkpoint.tensors():
        torch.testing.assert_close(tensor, plain[name])


def test_its_errors_name_the_weight(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = load_toy(monkeypatch, READERS, TOY)
    monkeypatch.setattr(toy, "PlainValues", lambda values: values.reshape(7))
    with pytest.raises(CorruptCheckpoint, match=r"_proj\.weight: its parts do not fit together"):
        list(open_checkpoint(model).tensors())


def test_it_works_as_a_plugin(model: Path) -> None:
    options = {"quantization": "none", "device": "cpu", "kv_memory": "4MiB", "progress": False}
    llm = LLM(str(model.with_name("model-plain")), **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = llm.generate("blocks", greedy)[0].outputs[0].token_ids
    assert [int(token) for token in run_with_plugin(TOY, PROGRAM, str(model)).split()] == list(expected)


def test_the_page_shows_it() -> None:
    assert page_shows("quantized-reader.md", TOY)
