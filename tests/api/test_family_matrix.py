"""Model types of transformers through the whole engine, and the page about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.errors import UnsupportedModel
from chairlift.models import describe
from chairlift.models.fallback.adapters import ADAPTERS
from chairlift.models.families import FAMILIES
from chairlift_lab.report.models_page import ALL_SETTINGS, models_page
from tests.api.family_matrix import RESULTS, SETTINGS, model_types, recorded, run_family
from tests.models.tiny_configs import tiny_config

pytest.importorskip("transformers")

# Of every kind one that runs by the fallback: adapters with and without ALiBi, absolute positions, sinks, experts.
FAST = ["falcon", "bloom", "gptj", "gpt2", "stablelm", "mimo_v2_flash", "phimoe"]
# The families that must run: those that people ask for, and those that ran first.
WANTED = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "smollm3",
    "phi",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "ministral3",
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "seed_oss",
    "hunyuan_v1_dense",
    "minimax_m2",
    "llama4_text",
    "nemotron",
    "apertus",
    "arcee",
    "starcoder2",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "nemotron_h",
    "falcon_h1",
    "bamba",
    "lfm2",
    "kimi_linear",
    "mamba2",
    "falcon",
    "stablelm",
    "bloom",
    "gpt2",
    "gpt_neox",
    "opt",
]
MOST_MISSING = 4


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one thread: for models this small a second one only adds waiting."""


@pytest.mark.parametrize("model_type", FAST)
def test_tokens_equal_transformers(model_type: str, tmp_path: Path) -> None:
    assert run_family(model_type, tmp_path).features == tuple(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", model_types())
def test_every_model_type_runs_or_is_refused(model_type: str, tmp_path: Path) -> None:
    """None crashes, and none gives other tokens than transformers; the recorded results are these."""
    result = run_family(model_type, tmp_path)
    assert (result.path == "refused") == (result.problem is not None)
    assert recorded(model_type, result) == json.loads(RESULTS.read_text())[model_type]


def test_page_shows_the_recorded_results() -> None:
    """`make models-page` writes it."""
    assert RESULTS.with_suffix(".md").read_text() == models_page(json.loads(RESULTS.read_text()))
    assert len(SETTINGS) == ALL_SETTINGS


def test_recorded_results_are_complete() -> None:
    """`python -m tests.api.family_matrix --write` records them; the slow test finds model types that are missing."""
    results = json.loads(RESULTS.read_text())
    assert {name for name, each in results.items() if each["path"] == "native"} == FAMILIES.keys() & results.keys()
    assert not [name for name, each in results.items() if each["path"] == "wrong"]
    runs = {name for name, each in results.items() if each["path"] in ("native", "fallback")}
    missing = [name for name in WANTED if name not in runs]
    assert len(missing) <= MOST_MISSING, missing


@pytest.mark.parametrize("model_type", ["llama", "mamba", "xlnet", "gptj"])
def test_recorded_paths_are_current(model_type: str) -> None:
    try:
        describe(tiny_config(model_type).to_dict())
        refused = False
    except UnsupportedModel:
        refused = True
    assert refused == (json.loads(RESULTS.read_text())[model_type]["path"] == "refused")


def test_every_adapter_is_in_the_matrix() -> None:
    results = json.loads(RESULTS.read_text())
    assert {results[name.replace("openai_gpt", "openai-gpt")]["path"] for name in ADAPTERS.names()} == {"fallback"}
