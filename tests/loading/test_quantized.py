"""Quantized checkpoints against the published formulas in float64, and their greedy tokens against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.startup import load_model
from chairlift.errors import ChairliftError, CorruptCheckpoint, UnsupportedModel
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.layers.formats.fp8 import FP8Weight
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.quantized import READERS
from chairlift.loading.stored_weight import MicroscaledFloats, StoredWeight
from tests.loading.quantized_writing import SCHEMES, words, write_quantized


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", SCHEMES)
def test_values_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    expected = write_quantized(tmp_path / "model", SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path / "model")
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys() == set(checkpoint.names())
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].double(), tensor.double(), rtol=1e-6, atol=1e-9)
    stored = dict(checkpoint.stored())
    quantized = [weight for weight in stored.values() if isinstance(weight, StoredWeight)]
    assert len(quantized) == 14 - max(0, len(SCHEMES[name].skipped) - 2)
    assert all((weight.as_integers() is not None) == ("int4" in name or "gptq" in name or "awq" in name
               or "w8a16" in name) for weight in quantized)  # fmt: skip
    prompt = [5, 17, 40, 211, 90]
    llm = LLM(str(tmp_path / "model"), device="cpu", dtype="float32", kv_memory="4MiB", progress=False)
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0]
    assert list(output.outputs[0].token_ids) == greedy(tmp_path / "model-plain", prompt, 12)


def test_the_startup_report_says_what_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_quantized(tmp_path / "model", SCHEMES["awq"])
    for quantization, report in {
        "none": "AWQ, 4-bit integers in groups of 32: dequantized to float32",
        "checkpoint": "AWQ, 4-bit integers in groups of 32: as stored where possible (linear maps: ",
    }.items():
        caplog.clear()
        with caplog.at_level("INFO", logger="chairlift"):
            load_model(str(tmp_path / "model"), EngineConfig(device="cpu", quantization=quantization), progress=False)
        assert report in caplog.text


def refused(tmp_path: Path, settings: Any) -> str:
    """The message for a checkpoint with this quantization_config, of which no tensor may be read."""
    write_quantized(tmp_path / "model", SCHEMES["awq"])
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(ChairliftError) as raised:
        open_checkpoint(tmp_path / "model")
    assert isinstance(raised.value, (UnsupportedModel, CorruptCheckpoint))
    return str(raised.value)


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
COMPRESSED = {"quant_method": "compressed-tensors"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "quip"}, "quantized by 'quip'; supported are auto-round, awq, bitsandbytes, compressed"),
    ("quip", "quantized by 'quip'"),
    ({"quant_method": "awq", "bits": 3}, "weights of 3 bits are not supported"),
    ({"quant_method": "awq", "version": "gemv"}, "'gemv' is not supported"),
    ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits are not supported"),
    ({"quant_method": "gptq"}, "bits=None, which is not an integer"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"bits": 8}}}, "settings of single modules"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "is not two positive integers"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "only e4m3 is supported"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt, but W4A8_AWQ is not read, only FP8"),
    ({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION"}, "has no quantized_layers"),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "FP8"}, "a.c": {"quant_algo": 3}}},
        "3 of the layer 'a.c' is not read",
    ),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "type 'int4' are not read"),
    ({"quant_method": "quark"}, "names no type of weights"),
    (AUTO_ROUND | {"packing_format": "auto_round:exl"}, "layout 'auto_round:exl'"),
    (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 8}}}, "settings of single layers ('lm_head')"),
    ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
    (COMPRESSED, "no config_groups"),
    (COMPRESSED | {"format": "mxfp6-pack-quantized", "config_groups": {"a": GROUP}}, "'mxfp6-pack-quantized'"),
    (COMPRESSED | {"format": "pack-quantized", "config_groups": {"a": {"weights": None}}}, "quantizes no weights"),
    (
        COMPRESSED | {"format": "pack-quantized", "config_groups": {"a": GROUP}, "sparsity_config": {"format": "2:4"}},
        "sparse weights (2:4)",
    ),
    (
        COMPRESSED | {"format": "pack-quantized", "config_groups": {"a": GROUP}, "transform_config": {"R1": {}}},
        "rotations",
    ),
    (COMPRESSED | {"format": "pack-quantized", "config_groups": {"a": GROUP}}, "no tensor is"),  # AWQ's tensors
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_before_weights_are_read(settings: Any, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, settings)


def test_damaged_parts_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def damage(scheme: str, part: str, change: Any) -> str:
        write_quantized(tmp_path / "model", SCHEMES[scheme])
        file = tmp_path / "model" / "model.safetensors"
        tensors: dict[str, Tensor] = load_file(file)
        name = f"model.layers.0.mlp.up_proj.{part}"
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, file)
        with pytest.raises(CorruptCheckpoint) as raised:
            list(open_checkpoint(tmp_path / "model").tensors())
        return str(raised.value)

    for scheme, part in {"awq": "scales", "gptq": "qzeros", "fp8 blocks": "weight_scale_inv"}.items():
        assert "model.layers.0.mlp.up_proj.weight: " in damage(scheme, part, lambda tensor: tensor[:, :-1])
    assert "the groups of 64 columns must be from 0 to 1" in damage("gptq", "g_idx", lambda tensor: tensor + 1)
    assert "does not fit weight_shape" in damage("compressed int4", "weight_shape", lambda tensor: tensor * 3)
    state = "weight.quant_state.bitsandbytes__nf4"
    assert "quant_state is missing or damaged" in damage("bitsandbytes nf4", state, lambda tensor: tensor[:-9])


@pytest.mark.parametrize("name", SCHEMES)
def test_parts_of_any_shape_and_type_are_read_or_refused(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_quantized(tmp_path / "model", SCHEMES[name])
    file = tmp_path / "model" / "model.safetensors"
    good = load_file(file)
    changes = [
        lambda tensor: tensor.flatten(),
        lambda tensor: tensor[:0],
        lambda tensor: tensor[..., :1],
        lambda tensor: tensor.to(torch.float64),
        lambda tensor: torch.cat((tensor, tensor)),
        None,
    ]
    for part in [part for part in good if ".layers.1.self_attn.o_proj." in part]:
        for change in changes:
            tensors = {other: tensor for other, tensor in good.items() if other != part}
            if change is not None:
                tensors[part] = change(good[part] if good[part].ndim else good[part][None]).contiguous()
            save_file(tensors, file)
            try:
                for _, weight in open_checkpoint(tmp_path / "model").stored():
                    if isinstance(weight, StoredWeight):
                        weight.dequantized()
            except ChairliftError:
                continue


def test_fp8_weights_keep_their_numbers(tmp_path: Path) -> None:
    """Scales per tensor and channel are used as they are; blocks are rounded again with a scale per channel."""
    for name, limit in {"compressed fp8, dynamic": 1e-6, "compressed fp8, static": 1e-6, "fp8 blocks": 0.04}.items():
        expected = write_quantized(tmp_path / name, SCHEMES[name])
        stored = dict(open_checkpoint(tmp_path / name).stored())
        names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
        parts = [part for part in (stored[each] for each in names) if isinstance(part, StoredWeight)]
        values = torch.cat([expected[each].double() for each in names])
        weight = FP8Weight.empty(*values.shape, torch.bfloat16, torch.device("cpu"))
        weight.load(parts)
        weight = weight.finalized()
        assert isinstance(weight, FP8Weight)
        assert float((weight.dequantized().double() - values).norm() / values.norm()) < limit
        assert weight.plain is None


@pytest.mark.parametrize("name", ["modelopt nvfp4", "compressed nvfp4", "quark mxfp4"])
def test_4_bit_floats_stay_so_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Their scales are rounded to float16, unless they are powers of two; those of a map may differ in form."""
    expected = write_quantized(tmp_path / "model", SCHEMES[name])
    config = EngineConfig(device="cpu", dtype="float32", quantization="checkpoint")
    model = load_model(str(tmp_path / "model"), config, progress=False).model
    weights = [linear.weight for linear in model.layers[0].linears()]
    assert [weight.name for weight in weights] == ["blocks"] * 4
    down = next(weight for weight in weights if weight.in_features == 96)
    values = down.rows(torch.arange(down.out_features)).double()
    exact = expected["model.layers.0.mlp.down_proj.weight"].double()
    torch.testing.assert_close(values, exact, rtol=0 if "mxfp4" in name else 2**-11, atol=0)
    assert down.num_bytes < 0.85 * down.out_features * down.in_features  # padded to whole units


def test_powers_of_two_that_float16_lacks_are_dequantized() -> None:
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8).view(16, 2, 16)
    for exponent, kind in {100: None, 104: "E2M1_32", 142: "E2M1_32", 143: None}.items():
        weight = MicroscaledFloats(codes, torch.full((16, 2), exponent, dtype=torch.uint8))
        assert weight.block_kind == kind
        assert BlockWeight.accepts([weight], torch.float32, torch.device("cpu")) == (kind is not None)


def test_block_scales_may_be_as_many_as_rows() -> None:
    """Four rows of 512 columns have four scales in blocks of 128: along the columns."""
    reader = READERS.get("fp8")({"quant_method": "fp8", "weight_block_size": [128, 128]})
    numbers, scales = torch.ones(4, 512).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    weight = reader.read("w", {"weight": numbers, "weight_scale_inv": scales}).dequantized()
    assert torch.equal(weight, scales.repeat_interleave(128, 1).expand(4, 512))
    for per_row in (torch.arange(1.0, 5.0), torch.arange(1.0, 5.0)[:, None]):
        weight = reader.read("w", {"weight": numbers, "weight_scale": per_row}).dequantized()
        assert torch.equal(weight, torch.arange(1.0, 5.0)[:, None].expand(4, 512))


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    """Checkpoints of NVIDIA have hf_quant_config.json beside a config.json that says nothing."""
    folder = tmp_path / "model"
    expected = write_quantized(folder, SCHEMES["modelopt"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = folder / "hf_quant_config.json"

    def write(algorithm: str | None) -> None:
        settings = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))

    write("FP8")
    checkpoint = open_checkpoint(folder)
    unused = "(its scales of activations and the KV cache are not used)"
    assert checkpoint.quantization == f"ModelOpt FP8, 8-bit floats with a scale per tensor {unused}"
    assert dict(checkpoint.tensors()).keys() == expected.keys()
    write("W4A16_AWQ")
    with pytest.raises(UnsupportedModel, match="W4A16_AWQ is not read"):
        open_checkpoint(folder)
    for nothing in (None, "absent"):
        write(None) if nothing is None else own.unlink()
        assert open_checkpoint(folder).quantization is None


def test_a_missing_scale_is_refused(tmp_path: Path) -> None:
    """8-bit floats without their scales must not pass as values."""
    from safetensors.torch import load_file, save_file

    write_quantized(tmp_path / "model", SCHEMES["fp8 blocks"])
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight holds torch\.float8_e4m3fn"):
        LLM(str(tmp_path / "model"), device="cpu", progress=False)


def test_every_reader_is_found_by_its_method() -> None:
    assert {name: READERS.get(name).name for name in READERS.names()} == {name: name for name in READERS.names()}


def test_the_writer_packs_as_the_compressed_tensors_library() -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    numbers = torch.randint(-8, 8, (24, 64), dtype=torch.int8)
    assert torch.equal(library.pack_to_int32(numbers, 4), words((numbers + 8).numpy(), 4))
    zeros = numbers[:, :2].contiguous()
    assert torch.equal(library.pack_to_int32(zeros, 4, packed_dim=0), words((zeros + 8).numpy().T, 4).T)
