"""Every family through GGUF gives the tensors and logits of its Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chairlift.loading.checkpoint import open_checkpoint
from tests.loading.gguf_writing import write_gguf
from tests.loading.tiny_models import FAMILIES, save_model


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_back_the_hugging_face_model(family: str, tmp_path: Path) -> None:
    reference = save_model(family, tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    original = dict(open_checkpoint(tmp_path / "hf").tensors())
    checkpoint = open_checkpoint(tmp_path / "model.gguf")

    tensors = dict(checkpoint.tensors())
    assert sorted(checkpoint.names()) == sorted(tensors) == sorted(original)
    for name, tensor in tensors.items():
        # norms may have been stored as 1 + w, and float32 rounds that
        torch.testing.assert_close(tensor, original[name].float(), atol=1e-6, rtol=0, msg=name)

    again = tmp_path / "again"
    again.mkdir()
    save_file(tensors, again / "model.safetensors", {"format": "pt"})
    (again / "config.json").write_text(json.dumps(checkpoint.config))
    _assert_same_logits(reference, again)


def _assert_same_logits(reference: torch.nn.Module, folder: Path) -> None:
    """40 tokens reach past every sliding window and every original context in these models."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 160, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, actual = reference(tokens).logits, model(tokens).logits
    assert expected.std() > 0.05, "flat logits would hide a mistake"
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
