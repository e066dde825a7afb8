"""What models with recurrent layers do beyond equal logits: formats, types, bad configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.models import describe
from tests.models.checkpoints import (
    assert_matches,
    load,
    make_reference,
    prompts,
    reference_logits,
    run_alone,
    save,
    stream,
)
from tests.models.hybrid_configs import HYBRID_CONFIGS

transformers = pytest.importorskip("transformers")
KINDS = [
    "qwen3.5",
    "mamba 2",
    "lfm2",
    "kimi linear",
    "falcon h1",
]  # every kind of recurrent layer, and two side by side


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    reference = make_reference(HYBRID_CONFIGS[request.param]())
    folder = tmp_path_factory.mktemp("hybrid")
    save(reference, folder)
    return folder, reference


def test_bfloat16_and_int8_stay_close(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    tokens = prompts(20)[0]
    exact = reference_logits(reference, tokens).log_softmax(-1)
    for options in ({"dtype": torch.bfloat16}, {"quantization": "int8"}):
        if "quantization" in options and reference.config.model_type == "kimi_linear":
            continue  # int8 is refused for models with experts
        found = run_alone(load(folder, **options), tokens).float().log_softmax(-1)
        error = (found - exact).abs().mean(-1)
        # The norm behind a recurrence enlarges the errors of rows whose output is small.
        assert error.median() < 0.1 * exact.std(), options
        assert error.max() < 0.6 * exact.std(), options


def test_text_part_of_multimodal_qwen3_5(tmp_path: Path) -> None:
    text = HYBRID_CONFIGS["qwen3.5"]().to_dict() | {"tie_word_embeddings": False}
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 60}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.set_attn_implementation("eager")
    assert save(whole, tmp_path)["model_type"] == "qwen3_5"
    assert any("visual" in name for name, _ in stream(tmp_path))
    assert_matches(load(tmp_path), whole, 23, 3)


def test_time_step_limits(tmp_path: Path) -> None:
    """JSON may have Infinity, which transformers writes as an object."""
    config = HYBRID_CONFIGS["bamba"]().to_dict()
    described = [
        describe(config | {"time_step_limit": limit})
        for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)
    ]
    assert described[0] == described[1] == described[2]
    for bad in ([0.0], [1.0, 0.5], [0.0, {"__float__": "NaN"}], [float("nan"), 1.0], "0"):
        with pytest.raises(CorruptCheckpoint, match="time_step_limit"):
            describe(config | {"time_step_limit": bad})


def test_time_steps_of_nemotron_h_are_limited_as_nvidia_limits_them() -> None:
    config = HYBRID_CONFIGS["nemotron h"]().to_dict() | {"time_step_min": 0.001, "time_step_limit": [0.0, 2.5]}
    shapes = [describe(each).layers[0].mixer for each in (config, config | {"time_step_limit": None})]  # type: ignore[attr-defined]
    assert [shape.step_limits for shape in shapes] == [(0.0, 2.5), (0.0, float("inf"))]


@pytest.mark.parametrize(
    ("name", "changes", "error", "match"),
    [
        ("qwen3.5", {"layer_types": ["linear_attention", "sparse", "full_attention"]}, UnsupportedModel, "sparse"),
        ("qwen3.5", {"layer_types": ["full_attention"]}, CorruptCheckpoint, "layer_types must have 3 entries"),
        ("qwen3.5", {"linear_num_key_heads": 4}, CorruptCheckpoint, "linear_num_value_heads"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, CorruptCheckpoint, "linear_conv_kernel_dim"),
        ("bamba", {"mamba_d_head": 21}, CorruptCheckpoint, "mamba_d_head"),
        ("nemotron h", {"layers_block_type": ["linear_attention", "x"]}, UnsupportedModel, "'x'"),
        ("falcon h1", {"projectors_bias": True}, UnsupportedModel, "projectors_bias"),
    ],
)
def test_bad_configs(name: str, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        describe(HYBRID_CONFIGS[name]().to_dict() | changes)
