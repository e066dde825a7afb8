"""Random weights for a config whose linear maps are 4-bit integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.layers.formats.int4 import Int4Weight
from chairlift.loading.stored_weight import GroupedIntegers
from chairlift.models import build_model
from chairlift.models.dummy import DummyCheckpoint
from chairlift_lab.common.model_shapes import SHAPES
from tests.kernels.tiny_config import CONFIG

GPTQ: dict[str, Any] = SHAPES["llama3-8b-gptq"]["quantization_config"]


def write(folder: Path, **settings: Any) -> Path:
    config = CONFIG | {"intermediate_size": 64, "quantization_config": GPTQ | {"group_size": 32} | settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_layers_are_4_bit_integers(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    dummy = DummyCheckpoint(write(tmp_path), cpu)
    stored = {name: weight for name, weight in dummy.stored() if isinstance(weight, GroupedIntegers)}
    assert {name.rsplit(".", 2)[1] for name in stored} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    values = torch.cat([weight.dequantized().flatten() for weight in stored.values()])
    assert 0.015 < float(values.std()) < 0.025
    model = build_model(dummy.config, dummy.stored(), dtype=torch.bfloat16, device=cpu, quantization="checkpoint")
    layer: Any = model.layers[0]  # type: ignore[attr-defined]
    assert all(isinstance(linear.weight, Int4Weight) for linear in layer.linears())


def test_the_head_of_a_4_bit_checkpoint_is_rounded_to_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    dummy = DummyCheckpoint(write(tmp_path), cpu)
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": cpu, "quantize_head": True}
    given["quantization"] = "checkpoint"
    with pytest.raises(InvalidParameter, match=r"quantize_head.*8-bit floats are for GPUs"):
        build_model(dummy.config, dummy.stored(), **given)
    monkeypatch.setattr(FP8Weight, "obstacles", classmethod(lambda cls, dtype, device: []))
    model: Any = build_model(dummy.config, dummy.stored(), **given)
    assert isinstance(model.head.weight, FP8Weight)
    assert all(isinstance(linear.weight, Int4Weight) for linear in model.layers[0].linears())
    exact = model.embedding.table.double()  # the head is tied
    assert float((model.head.weight.dequantized().double() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("settings", [{"bits": 8}, {"sym": False}, {"desc_act": True}, {"quant_method": "awq"}])
def test_other_forms_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="symmetric gptq of 4 bits"):
        DummyCheckpoint(write(tmp_path, **settings), torch.device("cpu"))
