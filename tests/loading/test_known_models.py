"""The table of known models: what it says follows from the shapes in it, and each of them runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.model_check import NATIVE, PLAIN_TYPES, check_model
from chairlift.loading.known_models import DEFAULT_MODEL, KnownModel, WheelModel, known_model, known_models
from chairlift.models import describe, has_experts

SHAPES = Path(__file__).parents[1] / "api"
PUBLISHED = {
    **{name: each["config"] for name, each in json.loads((SHAPES / "recalled_configs.json").read_text()).items()},
    **json.loads((SHAPES / "published_configs.json").read_text()),
}
NAMES = [model.name for model in known_models()]


def test_the_table_goes_from_small_to_large() -> None:
    assert NAMES[0] == DEFAULT_MODEL
    assert 10 <= len(NAMES) <= 15
    assert len({model.hub_id for model in known_models()} | set(NAMES)) == 2 * len(NAMES)
    sizes = [model.num_parameters for model in known_models()]
    assert sizes == sorted(sizes)
    assert 0.1e9 < sizes[0] < 0.2e9 < 29e9 < sizes[-1] < 31e9


@pytest.mark.parametrize("model", known_models(), ids=NAMES)
def test_figures_follow_from_the_shape(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))  # The models are described as if they were not here.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    checked = check_model(model.name)
    assert (checked.path, checked.reason) == (NATIVE, None)
    assert checked.num_parameters == model.num_parameters
    assert checked.max_model_len == model.context
    int8 = None if has_experts(model.config) else checked.formats["int8"].weight_bytes  # Experts keep their type.
    on_cpu = int8 or checked.weight_bytes["float32"]
    kept = checked.formats.get("checkpoint")
    assert model.cpu_bytes == on_cpu
    assert model.gpu_bytes == (kept.weight_bytes if kept is not None else checked.weight_bytes["bfloat16"])
    if not isinstance(model, WheelModel) and kept is None:  # Files also hold what is not read, such as images' parts.
        assert 2 * model.num_parameters <= model.size * 1.01 < 2.6 * model.num_parameters


@pytest.mark.parametrize("name", [model.name for model in known_models() if model.hub_id in PUBLISHED])
def test_shapes_are_those_of_the_hub(name: str) -> None:
    """Of those whose config.json is known in full."""
    model = known_model(name)
    assert model is not None
    own, full = describe(dict(model.config)), describe(PUBLISHED[model.hub_id])
    assert own.num_parameters == full.num_parameters
    for dtype in PLAIN_TYPES.values():
        assert bytes_per_token(own.attention_layers, dtype) == bytes_per_token(full.attention_layers, dtype)


def test_a_model_is_known_by_its_name_and_by_its_id() -> None:
    assert known_model("qwen3-0.6b") is known_model("Qwen/Qwen3-0.6B") is not None
    assert known_model("qwen3") is None
