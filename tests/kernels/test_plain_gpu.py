"""Layers on a GPU that are not fused as a whole: norms behind blocks in few kernels, none of them torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.attention.interface import StepAttention
from chairlift.attention.paged.gpu import PagedGPUStep
from chairlift.attention.storage import KVStorage
from chairlift.models import build_model
from chairlift.models.decoder import Decoder
from chairlift.models.programs.base import PlainProgram
from chairlift.models.programs.fuse_gpu import GPUProgram
from chairlift.runner.memory import allocate_storage
from tests.kernels.test_fused_gpu import hidden_rows, logits, make_model, tensors
from tests.kernels.tiny_config import CONFIG

ON_GPU = (
    "layers.embedding",
    "layers.formats.none",
    "layers.mlp",
    "layers.norm",
    "layers.per_layer_input",
    "layers.rope",
    "layers.rows",
    "models.decoder_layer",
    "models.programs.base",
)
SANDWICH: dict[str, Any] = {"num_hidden_layers": 2, "hidden_activation": "gelu_pytorch_tanh"}
WINDOWED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA4 = SANDWICH | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 300,
    "num_key_value_heads": 1,
    "attention_multiplier": 0.25,  # with the usual 1, scores of random keys amplify how numbers are rounded
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": SANDWICH
    | WINDOWED
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3": SANDWICH
    | WINDOWED
    | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 20},
    "gemma4": GEMMA4
    | {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "gemma4 keys as values": GEMMA4
    | {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    "glm4": {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "num_hidden_layers": 2,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "olmo2": {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "num_hidden_layers": 2},
    "olmo3": {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 2} | WINDOWED,
}
ROWS = [(0, 0), (17, 3), (8, 6)]
# Operations without a kernel on a GPU, those of `logits` that make the batch, and those of Triton's interpreter.
NO_KERNELS = {"empty", "empty_like", "view", "slice", "split", "split_with_sizes", "select", "flatten", "unflatten"}
NO_KERNELS |= {"detach", "detach_", "lift_fresh", "copy_", "set_", "zeros", "new_empty"}


class TorchKernels(TorchDispatchMode):
    """The operations of torch that would be kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in NO_KERNELS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cpu":
        pytest.skip("tests of whole models on the GPU compare with transformers")
    monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)
    monkeypatch.setattr("chairlift.layers.formats.none.can_pack", lambda weight: False)
    for name in ON_GPU:
        monkeypatch.setattr(f"chairlift.{name}.on_gpu", lambda device: True)


def filled_storage(model: Decoder) -> KVStorage:
    storage = allocate_storage(model.attention_layers, 12, 8, torch.float16, torch.device("cpu"))
    torch.manual_seed(1)
    for side in (*storage.keys, *storage.values):
        side.copy_(torch.randn_like(side.float()))
    return storage


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_products", [True, False], ids=["few rows", "many rows"])
@pytest.mark.usefixtures("as_on_gpu")
def test_kernels_equal_torch(
    family: str, own_products: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.kernels.triton.products.tiling.is_faster", lambda *sizes: own_products)
    model = make_model(FAMILIES[family], device)
    assert isinstance(model.program, GPUProgram)
    storages = [filled_storage(model) for _ in range(2)]
    with torch.inference_mode():
        with pytest.MonkeyPatch.context() as one_at_a_time:
            for name in ON_GPU:
                one_at_a_time.setattr(f"chairlift.{name}.on_gpu", lambda device: False)
            one_at_a_time.setattr(PagedGPUStep, "from_projection", StepAttention.from_projection)
            one_at_a_time.setattr(model, "program", PlainProgram(model.program.parts))
            expected = logits(model, storages[0], ROWS)
        with TorchKernels() as kernels:
            found = logits(model, storages[1], ROWS)
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) < 5e-3
    for mine, theirs in zip(storages[1].keys + storages[1].values, storages[0].keys + storages[0].values, strict=True):
        assert float((mine.float() - theirs.float()).abs().max()) < 0.05
    products = {"linear", "mm", "addmm"}  # cuBLAS
    assert own_products == (not products & set(kernels.names))
    beside = set() if own_products else {"gelu", "mul_"}  # of a layer's own inputs
    assert set(kernels.names) <= products | beside


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "olmo2"])
@pytest.mark.usefixtures("as_on_gpu")
def test_batch_invariance(family: str, device: torch.device) -> None:
    """A token's hidden state is the same, bit for bit, in a prompt, in chunks and token by token beside others."""
    options: dict[str, Any] = {"dtype": torch.float16, "device": torch.device("cpu"), "batch_invariant": True}
    model = build_model(CONFIG | FAMILIES[family], tensors(FAMILIES[family], device), **options)
    assert isinstance(model, Decoder)
    assert isinstance(model.program, GPUProgram)
    storage = allocate_storage(model.attention_layers, 6, 8, torch.float16, torch.device("cpu"))
    first, second = [3 + 7 * i % 250 for i in range(20)], [5 + 11 * i % 250 for i in range(9)]
    mine, theirs = [0, 1, 2], [3, 4]
    with torch.inference_mode():
        (whole,) = hidden_rows(model, storage, [(first, 0, mine)])
        again = [hidden_rows(model, storage, [(first[:13], 0, mine)])[0]]
        again += hidden_rows(model, storage, [(first[:17], 13, mine)])
        for end in range(18, 21):
            found = hidden_rows(model, storage, [(first[:end], end - 1, mine), (second, 0, theirs)])
            again.append(found[0])
    assert torch.cat(again).equal(whole)
