"""A model family from outside the package runs on the decoder of the package."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import UnsupportedModel
from chairlift.layers.mlp import ACTIVATIONS
from chairlift.models import build_model, describe, supported_families
from chairlift.models.decoder import Decoder
from chairlift.models.dummy import dummy_tensors
from chairlift.models.families import FAMILIES, Family
from tests.extending.pages import TOYS, missing_on, page_shows, run_with_plugin
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
    monkeypatch.setitem(FAMILIES, "normed_llama", FAMILIES["llama"])  # Both are removed again after the test.
    monkeypatch.setitem(ACTIVATIONS, "quick_gelu", ACTIVATIONS["gelu"])
    exec((TOYS / TOY).read_text(), {})
    assert "Normed Llama" in supported_families()
    model = build_model(CONFIG, dummy_tensors(CONFIG, cpu), dtype=torch.float32, device=cpu)
    assert isinstance(model, Decoder)
    layer = model.layers[0]
    assert layer.attention.q_norm is not None
    assert model.config.norms.after_mlp == "post_feedforward_layernorm"
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    gate, up = layer.mlp.first(x).chunk(2, dim=-1)
    expected = layer.mlp.down(gate * torch.sigmoid(1.702 * gate) * up)
    torch.testing.assert_close(layer.mlp(x), expected)
    assert run_alone(model, prompts(9)[0]).shape == (9, 211)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"norms": {"before_mlp": "norm"}}, r"norms of a family must be NormNames"),
        ({"names": ("q", "k")}, r"names of a family must be PartNames"),
        ({"qk_norm": "heads"}, "qk_norm of a family must be one of .*'head'"),
        ({"norm_kind": "rmsnorm"}, "norm_kind of a family must be one of .*'rms'"),
        ({"rotated": "not_rotated"}, "rotated of a family must be a function"),
    ],
)
def test_a_wrong_field_of_a_family_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Family(title="Toy", **wrong)


def test_the_page_names_every_field() -> None:
    assert missing_on("model-family.md", [field.name for field in fields(Family)]) == []


def test_a_plugin_family_generates(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    printed = run_with_plugin(TOY, PROGRAM, str(tmp_path)).splitlines()[-1]
    assert len(printed.split()) == 8


def test_the_page_shows_the_toy() -> None:
    assert page_shows("model-family.md", TOY)
