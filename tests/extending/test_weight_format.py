"""A weight format from outside the package stores a model's weights like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine import weights
from chairlift.engine.startup import load_model
from chairlift.errors import InvalidParameter
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.base import FormatTraits, Fusion, WeightFormat, WeightStorage
from chairlift.layers.formats.none import PlainWeight
from chairlift.layers.linear import Linear
from chairlift.loading.weight_cache.cache_file import PackedArray
from chairlift.models.decoder import Decoder
from tests.extending.pages import load_toy, missing_on, page_shows, public, run_with_plugin
from tests.models.checkpoints import prompts, run_alone

TOY = "int4_rows.py"
PROGRAM = """
import sys
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], quantization="int4-rows", device="cpu", kv_memory="4MiB", progress=False)
print(*llm.generate("blocks", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
"""


def load(model: Path, quantization: str) -> Decoder:
    config = EngineConfig(quantization=quantization, device="cpu", kv_memory="4MiB")
    decoder = load_model(str(model), config, progress=False).model
    assert isinstance(decoder, Decoder)
    return decoder


def test_a_toy_format_stores_the_layers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="unknown 'int4-rows'"):
        EngineConfig(quantization="int4-rows")
    load_toy(monkeypatch, FORMATS, TOY)
    plain, rounded = load(checkpoint, "none"), load(checkpoint, "int4-rows")
    assert rounded.quantization == "int4-rows"
    assert isinstance(rounded.head.weight, PlainWeight), "the format leaves the head alone"
    generator = torch.Generator().manual_seed(0)
    for layer, exact in zip(rounded.layers, plain.layers, strict=True):
        for ours, theirs in zip(layer.linears(), exact.linears(), strict=True):
            assert ours.weight.plain is None
            assert ours.num_bytes == ours.out_features * (-(-ours.in_features // 2) + 4)
            x = torch.randn(5, ours.in_features, generator=generator)
            expected = theirs(x)
            errors = (ours(x) - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.min() > 0.01
            assert errors.max() < 0.2


@pytest.mark.parametrize("in_features", [6, 7])
def test_a_toy_format_rounds_to_the_nearest_of_15_levels(in_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, FORMATS, TOY)
    weight = torch.randn(4, in_features, generator=torch.Generator().manual_seed(1))
    linear = Linear(weight.clone(), format=FORMATS.get("int4-rows"))
    linear.finalize()
    step = weight.abs().amax(dim=1) / 7
    found = linear(torch.eye(in_features)).T
    assert ((found - weight).abs().amax(dim=1) <= step / 2 + 1e-6).all()


def test_a_plugin_format_is_chosen_by_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run_with_plugin(TOY, PROGRAM, str(checkpoint)).splitlines()[-1]
    load_toy(monkeypatch, FORMATS, TOY)
    llm = LLM(str(checkpoint), quantization="int4-rows", device="cpu", kv_memory="4MiB", progress=False)
    output = llm.generate("blocks", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert printed == " ".join(map(str, output.token_ids))
    assert len(output.token_ids) == 8


def test_a_toy_format_refuses_with_its_own_reasons(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, FORMATS, TOY)
    with pytest.raises(InvalidParameter, match=r"quantization.*int4-rows is not possible.*float32 with it"):
        load_model(
            str(checkpoint), EngineConfig(quantization="int4-rows", dtype="bfloat16", device="cpu"), progress=False
        )


def test_a_toy_format_is_batch_invariant_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, FORMATS, TOY)
    generator = torch.Generator().manual_seed(2)
    weight = FORMATS.get("int4-rows")(torch.randn(64, 200, generator=generator))
    weight.pack()
    weight.batch_invariant = True
    x = torch.randn(50, 200, generator=generator)
    together = weight.product(x).rows
    assert all(torch.equal(weight.product(x[i : i + 1]).rows[0], together[i]) for i in range(50))


def test_a_format_without_a_required_member_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, FORMATS, TOY)
    for member in ("pack", "num_bytes", "product"):
        lacking = type("Lacking", (FORMATS.get("int4-rows"),), {member: getattr(WeightFormat, member)})
        with pytest.raises((TypeError, NotImplementedError), match=f"(Lacking|int4-rows).*{member}"):
            print(lacking(torch.zeros(4, 4)).finalized().num_bytes)


def test_a_format_is_refused_on_a_device_that_it_does_not_name() -> None:
    class ForGPUs(PlainWeight):
        traits = FormatTraits(devices=("cuda",))

    assert ForGPUs.obstacles(torch.float32, torch.device("cpu")) == ["it is for cuda, not for cpu"]
    assert ForGPUs.obstacles(torch.float32, torch.device("cuda")) == []


def test_a_weight_cache_keeps_what_a_format_gives_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_toy(monkeypatch, FORMATS, TOY)
    monkeypatch.setattr(weights, "MIN_BYTES", 0)
    restored = []

    def use_arrays(self: Any, arrays: Sequence[PackedArray]) -> None:
        self.pairs, self.scales = (torch.from_numpy(array.values) for array in arrays)
        self.plain = None
        restored.append(self)

    def packed_arrays(self: Any) -> list[PackedArray]:
        return [PackedArray("pairs", self.pairs.numpy()), PackedArray("scales", self.scales.numpy())]

    format = FORMATS.get("int4-rows")
    monkeypatch.setattr(format, "packed_arrays", packed_arrays)
    monkeypatch.setattr(format, "use_arrays", use_arrays)
    config = EngineConfig(quantization="int4-rows", device="cpu", kv_memory="4MiB", weight_cache=str(tmp_path))
    first, second = (load_model(str(checkpoint), config, progress=False).model for _ in range(2))
    assert len(restored) == 2 * sum(len(layer.linears()) for layer in first.layers)  # when written, and when read
    tokens = prompts(9)[0]
    assert torch.equal(run_alone(first, tokens), run_alone(second, tokens))
    with pytest.raises(ValueError, match="'codes' must be uint8 or uint16 or float32, not int8"):
        PackedArray("codes", np.zeros(3, np.int8))


def test_the_page_names_every_member() -> None:
    members = public(WeightStorage, WeightFormat, FormatTraits, Fusion)
    assert missing_on("weight-format.md", set(members) - {"becomes_blocks", "is_alone"}) == []


def test_the_page_shows_the_toy() -> None:
    assert page_shows("weight-format.md", TOY)
