"""Every family with an adapter of PEFT against transformers with PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.attention.batch import AdapterRows, StepBatch
from chairlift.errors import UnsupportedModel
from chairlift.loading.adapter_file import open_adapter
from chairlift.models.adapters import attach_adapters
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from tests.adapters import write_adapter
from tests.models.checkpoints import load, make_reference, prompts, save
from tests.models.dense_attend import DenseCache
from tests.models.hybrid_configs import HYBRID_CONFIGS
from tests.models.slot_states import SlotStates
from tests.models.test_families import CONFIGS

peft = pytest.importorskip("peft")

# Modules that cannot have adapters: routers, gates of shared experts, and what both forms of latent attention read.
LEFT_OUT = {"gate", "router", "shared_expert_gate", "kv_b_proj", "lm_head"}
BY_DEFAULT = ("llama gqa", "gemma4 keys as values", "phi", "qwen2 moe", "mixtral", "nemotron", "lfm2", "qwen3.5 moe")
CASES = [
    pytest.param(make, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
    for name, make in {**CONFIGS, **HYBRID_CONFIGS}.items()
]


def attention_modules(model: Any) -> list[str]:
    """The linear maps by their last names, without those of feed-forward blocks where a model has experts: PEFT would
    adapt the stacked experts with them."""
    experts = any("experts" in name for name, _ in model.named_modules())
    mamba = any("mamba" in name or "conv1d" in name for name, _ in model.named_modules())
    names = set()
    for name, module in model.named_modules():
        words = name.split(".")
        is_inner = experts and ("mlp" in words or "feed_forward" in words or "block_sparse_moe" in words)
        is_outside = "layers" not in words or "forget_gate" in words or (mamba and words[-1] == "out_proj")
        if isinstance(module, torch.nn.Linear) and not is_inner and not is_outside:
            names.add(words[-1])
    return sorted(names - LEFT_OUT)


def run(model: CausalLM, tokens: Tensor, slot: int | None, rows: Tensor | None = None) -> Tensor:
    """Logits of a sequence whose rows have the adapter in `slot`."""
    pieces = [("only", len(tokens))]
    states = SlotStates(model.recurrent_layers).step(pieces)
    adapters = None
    if slot is not None:
        adapters = AdapterRows(torch.full((len(tokens), 1), slot, dtype=torch.int32), torch.ones(len(tokens), 1))
    batch = StepBatch(tokens, torch.arange(len(tokens)), recurrent=states, adapters=adapters)
    return model.logits(model.hidden_states(batch, DenseCache().step(pieces), rows).last)


@pytest.mark.parametrize("make", CASES)
@torch.inference_mode()
def test_an_adapter_gives_the_logits_of_peft(make: Callable[[], Any], tmp_path: Path) -> None:
    with torch.inference_mode(False):
        reference = make_reference(make())
        save(reference, tmp_path / "base")
        config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=attention_modules(reference))
        adapted = peft.get_peft_model(reference, config).eval()
        torch.manual_seed(5)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2)
        adapted.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "base")
    assert isinstance(model, Decoder)
    fitting, file = attach_adapters(model, max_slots=3), open_adapter(tmp_path / "adapter")
    fitting.check(file)
    model.adapters.put(2, model.adapters.placed(fitting.pack(file)))
    (tokens,) = prompts(17)
    expected = adapted(tokens[None]).logits[0]
    with adapted.disable_adapter():
        base = adapted(tokens[None]).logits[0]
    assert (expected - base).abs().max() > 0.5, "the adapter must count"
    torch.testing.assert_close(run(model, tokens, 2), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(run(model, tokens, None), base, atol=1e-4, rtol=0)
    rows = torch.tensor([16, 3])
    torch.testing.assert_close(run(model, tokens, 2, rows), expected[rows], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("module", "shape", "problem"),
    [
        ("lm_head", (211, 60), "adapts lm_head, which cannot"),
        ("model.layers.0.mlp.gate", (5, 60), "routers"),
        ("model.layers.0.mlp.experts.0.up_proj", (22, 60), "experts"),
        ("model.layers.9.self_attn.q_proj", (60, 60), "which the model does not have"),
        ("model.layers.0.self_attn.k_proj", (60, 60), r"adapts \[60, 60\], but the model has \[30, 60\]"),
    ],
)
def test_modules_that_cannot_have_adapters_are_named(
    module: str, shape: tuple[int, int], problem: str, tmp_path: Path
) -> None:
    save(make_reference(CONFIGS["qwen2 moe"]()), tmp_path / "base")
    model = load(tmp_path / "base")
    assert isinstance(model, Decoder)
    tensors = {f"{module}.lora_A": torch.zeros(4, shape[1]), f"{module}.lora_B": torch.zeros(shape[0], 4)}
    file = open_adapter(write_adapter(tmp_path / "adapter", tensors))
    with pytest.raises(UnsupportedModel, match=problem):
        attach_adapters(model, max_slots=1).check(file)
