"""The default model, fetched on first use, compared with transformers reading the same file."""

from __future__ import annotations

import pytest
import torch

from chairlift.loading.checkpoint import Checkpoint, open_checkpoint
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.loading.resolve import resolve_model
from chairlift.loading.tokenizer import TokenizerFiles, load_tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "The chairlift never stops for boarding.",
    "In 1987 it carried 2,400 riders/hour; it's 42% more now!\n\n\tdef f(x):\n        return x  # ok",
    "Schöne Grüße, où est la neige? Снег идёт. 雪が降っています 🏔️🚡",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "   leading and trailing   ",
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def files(checkpoint: Checkpoint) -> TokenizerFiles:
    return load_tokenizer(checkpoint)


def test_config(checkpoint: Checkpoint) -> None:
    expected = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    assert {name: checkpoint.config[name] for name in expected} == expected
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert 90e6 < checkpoint.num_bytes < 98362432


@pytest.mark.parametrize("layers", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_weights_are_what_transformers_reads(checkpoint: Checkpoint, layers: int) -> None:
    """Compares the first layers and everything outside the layers.

    Calls what `from_pretrained(gguf_file=...)` calls, which itself needs the accelerate package.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.for_model(**(checkpoint.config | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(checkpoint.path), return_tensors=True, model_to_load=empty)["tensors"]
    assert len(expected) == layers * 9 + 2
    for name, tensor in checkpoint.tensors():
        if name in expected:
            torch.testing.assert_close(tensor, expected.pop(name), atol=0, rtol=0, msg=name)
    assert not expected


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(text: str, files: TokenizerFiles) -> None:
    ids = files.tokenizer.encode(text).ids
    assert files.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_facts(files: TokenizerFiles) -> None:
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert files.chat_template is not None
    assert "add_generation_prompt" in files.chat_template
    assert files.tokenizer.get_vocab_size() == 49152
    assert files.tokenizer.encode("12 apples").tokens == ["1", "2", "Ġapples"]
    assert files.tokenizer.encode("<|im_start|>user").ids[0] == 1
