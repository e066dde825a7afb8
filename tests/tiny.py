"""A tiny random model with a real tokenizer and chat template, as a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "a chairlift never stops for boarding and neither does the engine",
    "finished requests step off and waiting ones get on at every iteration",
    "many sequences are concatenated without padding into one ragged batch",
    "blocks are shared, copied on write and freed in the same step",
]


def byte_level_tokenizer(vocab_size: int = 320, more_special: Sequence[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def write_windowed_checkpoint(folder: Path) -> Path:
    """Write a random Gemma 3 model with one layer that sees all tokens and six that see a window of eight."""
    from tests.loading.tiny_models import save_model

    tokenizer = byte_level_tokenizer()
    save_model("gemma3", folder, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def write_tiny_checkpoint(
    folder: Path,
    *,
    chat_template: str = CHATML,
    more_special: Sequence[str] = (),
    positions: int = 256,
    head_dim: int = 16,
) -> Path:
    """Write a random Llama model with two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(more_special=more_special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": chat_template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
