"""An attention backend from outside the package serves a model like any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.attention.backends import BACKENDS
from chairlift.attention.backends.base import AttentionBackend, Capabilities, choose_backend
from chairlift.attention.batch import RaggedLayout, StepBatch
from chairlift.attention.interface import AttentionLayer, StepAttention
from chairlift.attention.storage import KVStorage
from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from tests.extending.pages import load_toy, missing_on, page_shows, public, run_with_plugin

TOY = "dense_attention.py"
PROMPTS = ["a chairlift never stops", "blocks", "many sequences are concatenated without padding into one batch"]
PROGRAM = """
import json, sys
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], attention="dense", device="cpu", kv_memory="4MiB", progress=False)
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
print(json.dumps([output.outputs[0].token_ids for output in llm.generate(json.loads(sys.argv[2]), params)]))
"""


def generate(model: Path, attention: str) -> list[list[int]]:
    llm = LLM(str(model), attention=attention, device="cpu", kv_memory="4MiB", progress=False)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def test_a_toy_backend_gives_the_same_tokens(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="unknown 'dense'"):
        EngineConfig(attention="dense")
    expected = generate(checkpoint, "bursted")
    assert len({token for tokens in expected for token in tokens}) > 10
    load_toy(monkeypatch, BACKENDS, TOY)
    assert "dense" in BACKENDS.names()
    assert generate(checkpoint, "dense") == expected


def test_a_plugin_backend_is_chosen_by_name(checkpoint: Path) -> None:
    printed = run_with_plugin(TOY, PROGRAM, str(checkpoint), json.dumps(PROMPTS))
    assert json.loads(printed.splitlines()[-1]) == generate(checkpoint, "bursted")


def test_a_toy_backend_refuses_with_its_own_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, BACKENDS, TOY)
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, softcap=30.0)
    cpu = torch.device("cpu")
    with pytest.raises(InvalidParameter, match="it has no soft-cap"):
        choose_backend("dense", [layer], cpu, torch.float32)
    plain = replace(layer, softcap=None)
    with pytest.raises(InvalidParameter, match="dense attention has no sinks"):
        choose_backend("dense", [plain, replace(plain, sinks=True)], cpu, torch.float32)
    with pytest.raises(InvalidParameter, match="dense attention cannot stay within chunks"):
        choose_backend("dense", [plain, replace(plain, chunk=4)], cpu, torch.float32)
    with pytest.raises(InvalidParameter, match=r"batch_invariant.*depends on the batch"):
        choose_backend("dense", [], cpu, torch.float32, invariant_for=64)
    assert choose_backend("auto", [], cpu, torch.bfloat16).name == "bursted", "auto prefers a backend of the package"


def test_the_page_names_every_member() -> None:
    members = public(AttentionBackend, Capabilities, StepAttention, AttentionLayer, RaggedLayout)
    own = {"invariant_for", "numbers_per_token"}  # not what a backend reads or writes
    assert missing_on("attention-backend.md", set(members) - own) == []


def test_a_toy_backend_attends_to_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, BACKENDS, TOY)
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, latent_dim=6)
    cache = torch.zeros(2, 4, 1, 8)
    layout = RaggedLayout([0, 3], [0], [3], torch.zeros(1, 1, dtype=torch.int32), torch.arange(3))
    batch = StepBatch(torch.zeros(3), torch.arange(3), layout)
    q, row = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    row = row[:, :1]
    tokens = [BACKENDS.get(name)().begin(batch, KVStorage([cache], [cache])) for name in ("dense", "bursted")]
    attended = [step.attend(layer, q, row, row[..., :6]) for step in tokens]
    assert attended[0].shape == (3, 2, 6)
    torch.testing.assert_close(*attended)


def test_the_page_shows_the_toy() -> None:
    assert page_shows("attention-backend.md", TOY)
