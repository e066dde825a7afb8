"""A model family from outside the package runs on the decoder of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chairlift.errors import UnsupportedModel
from chairlift.models import build_model, describe, supported_families
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.models.families import FAMILIES
from tests.extending.pages import TOYS, page_shows, run_with_plugin
from tests.models.checkpoints import prompts, run_alone

TOY = "normed_llama_family.py"
CONFIG = {
    "model_type": "normed_llama",
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROGRAM = """
import sys
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", device="cpu", kv_memory="1MiB", progress=False)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
print(*llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
"""


def test_a_toy_family_is_built_from_its_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UnsupportedModel, match="normed_llama"):
        describe(CONFIG)
    monkeypatch.setitem(FAMILIES, "normed_llama", FAMILIES["llama"])  # removed again after the test
    exec((TOYS / TOY).read_text(), {})
    assert "Normed Llama" in supported_families()
    model = build_model(CONFIG, dummy_tensors(CONFIG, cpu), dtype=torch.float32, device=cpu)
    assert isinstance(model, Decoder)
    assert model.layers[0].attention.q_norm is not None
    assert run_alone(model, prompts(9)[0]).shape == (9, 211)


def test_a_plugin_family_generates(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    printed = run_with_plugin(TOY, PROGRAM, str(tmp_path)).splitlines()[-1]
    assert len(printed.split()) == 8


def test_the_page_shows_the_toy() -> None:
    assert page_shows("model-family.md", TOY)
