"""gpt-oss from a checkpoint as published: exact MXFP4 values, greedy tokens as transformers in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.errors import CorruptCheckpoint
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.gguf.config import hf_generation_config
from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.stored_weight import MicroscaledFloats
from chairlift.models import build_model, describe
from chairlift.models.dummy import DummyCheckpoint
from chairlift_lab.common.model_shapes import SHAPES
from tests.loading.gguf_writing import finish
from tests.models.checkpoints import reference_logits, run_alone
from tests.models.gpt_oss_checkpoint import value_of, write_gguf, write_gpt_oss
from tests.models.greedy_everywhere import assert_greedy_everywhere

PROMPTS = [[5, 17, 40, 211, 90], [3 + 7 * i % 290 for i in range(43)], [3 + 7 * i % 290 for i in range(30)]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gpt-oss") / "tiny"
    return folder, write_gpt_oss(folder)


def test_every_code_and_scale_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    exponents = torch.tensor(
        [[0, 1, 2, 100, 126, 127, 128, 129, 140, 200, 250, 251, 252, 20, 3, 127]], dtype=torch.uint8
    )
    found = MicroscaledFloats(codes, exponents).dequantized()
    assert found.shape == (1, 512)
    for place, number in enumerate(found[0].double().tolist()):
        byte, group = int(codes.flatten()[place // 2]), place // 32
        code = byte >> 4 if place % 2 else byte & 15
        assert number == value_of(code) * 2.0 ** (int(exponents[0, group]) - 127)


def test_the_values_equal_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(110, 140, (3, 6, 2), dtype=torch.uint8, generator=generator)
    theirs = mxfp4.convert_moe_packed_tensors(codes, exponents, dtype=torch.float32)
    assert MicroscaledFloats(codes, exponents).dequantized().mT.equal(theirs)


def test_greedy_tokens_equal_transformers(checkpoint: tuple[Path, Any]) -> None:
    assert_greedy_everywhere(*checkpoint, PROMPTS)


def test_the_report_says_that_experts_are_dequantized(
    checkpoint: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="chairlift"):
        LLM(str(checkpoint[0]), device="cpu", dtype="float32", kv_memory="4MiB", progress=False)
    assert "mxfp4, 4-bit floats with a scale per 32: dequantized to float32" in caplog.text


def test_gguf_files_give_the_same_logits(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """With the experts in GGUF's MXFP4 blocks, which order the halves of bytes in another way."""
    path, reference = tmp_path / "model.gguf", checkpoint[1]
    write_gguf(path, reference, dict(load_file(checkpoint[0] / "model.safetensors")))
    file = open_checkpoint(path)
    assert file.quantization == "GGUF, MXFP4"
    config = file.config | {"swiglu_limit": 1.0}  # which GGUF files do not hold: all published models have the default
    model = build_model(config, file.stored(), dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.tensor(PROMPTS[1])
    torch.testing.assert_close(run_alone(model, tokens), reference_logits(reference, tokens), atol=1e-4, rtol=0)
    stored = dict(file.stored())["model.layers.1.mlp.experts.2.up_proj.weight"]
    microscaled = stored.as_microscaled()
    assert microscaled.dequantized().equal(stored.dequantized())


def test_end_does_not_end_the_output_of_gguf_files(tmp_path: Path) -> None:
    names = ["<|end|>", "<|return|>", "<|call|>", "x", "<|endoftext|>"]
    for tokens, expected in ((names, {1, 2, 4}), (["<|end|>", "x"], {0})):
        writer = GGUFWriter(tmp_path / "x.gguf", "gpt-oss")
        writer.add_token_list(tokens)
        writer.add_token_types([1 if token == "x" else 3 for token in tokens])
        writer.add_eot_token_id(0)
        finish(writer)
        assert set(hf_generation_config(GGUFFile(tmp_path / "x.gguf"))["eos_token_id"]) == expected


def test_the_published_shapes() -> None:
    small = SHAPES["gpt-oss-20b"]
    large = small | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": small["layer_types"] * 3}
    large["layer_types"] = large["layer_types"][:36]
    assert round(describe(small).num_parameters / 1e9, 1) == 20.9
    assert round(describe(large).num_parameters / 1e9, 1) == 116.8


def test_random_weights_for_4_bit_experts(checkpoint: tuple[Path, Any]) -> None:
    dummy = DummyCheckpoint(checkpoint[0], torch.device("cpu"))
    stored = dict(dummy.stored())
    assert sum(isinstance(weight, MicroscaledFloats) for weight in stored.values()) == 4 * 4 * 3  # layers, experts
    model = build_model(dummy.config, dummy.stored(), dtype=torch.float32, device=torch.device("cpu"))
    assert run_alone(model, torch.tensor(PROMPTS[0])).isfinite().all()


def test_parts_that_do_not_fit_are_refused(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    with pytest.raises(CorruptCheckpoint, match=r"down_proj: its parts do not fit together .*blocks"):
        list(open_checkpoint(tmp_path).tensors())
