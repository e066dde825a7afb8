"""A made checkpoint that gives scripted replies: a real model for tests with programs that need sensible answers.

The weights are constructed, not trained. The layers add nothing, so the next token depends only on the last one: each
piece of a reply is a token of its own, whose row of the head is the embedding of the piece before it. The chat template
ends each prompt with a token that chooses the reply: the number of tool results so far, or the last reply for
requests without tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKERS = ("<tool_call>", "</tool_call>")
HIDDEN = 256
CORPUS = Path(__file__).parent.parent / "docs"
# Prompts of coding assistants have tens of thousands of characters, which should not become as many tokens.
NUM_MERGED = 4096


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a reply that calls a tool, as this model's template writes calls."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def write_scripted_checkpoint(folder: Path, replies: Sequence[str], *, positions: int = 131_072) -> Path:
    """Write a model that answers with `replies[i]` after `i` tool results, at any temperature that clients use.

    A server of it needs `--kv-memory 64MiB` to hold 131,072 tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, chains = _tokenizer(replies)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": _template(len(replies)), "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id("<|im_end|>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # Rows of random signs are almost orthogonal: 256 with themselves, about 16 with any other.
        rows = model.model.embed_tokens.weight
        rows.copy_(torch.randn_like(rows).sign())
        head = model.lm_head.weight.zero_()
        for chain in chains:
            for token, following in zip(chain, [*chain[1:], end], strict=True):
                head[following] += rows[token]
    model.save_pretrained(folder)
    return folder


def _tokenizer(replies: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    """Return the tokenizer and each reply's tokens, which begin with the one that chooses the reply."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_MERGED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(page) for page in sorted(CORPUS.glob("*.md"))], trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    used: set[str] = set()
    chains = [_pieces(reply, used) for reply in replies]
    for piece in (piece for chain in chains for piece in chain if piece not in MARKERS):
        # Without a merge that makes it, such a token never occurs in a prompt.
        vocabulary.setdefault(_spelled(piece), len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.ByteLevel()
    choosers = [f"<|reply_{index}|>" for index in range(len(replies))]
    special = ["<|im_start|>", "<|im_end|>", *MARKERS, *choosers]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    spelled = [[piece if piece in MARKERS else _spelled(piece) for piece in chain] for chain in chains]
    ids = [
        [tokenizer.token_to_id(text) for text in (chooser, *chain)]
        for chooser, chain in zip(choosers, spelled, strict=True)
    ]
    return tokenizer, ids


def _pieces(reply: str, used: set[str]) -> list[str]:
    """Cut a reply to pieces of which none occurs twice in all replies, since a token has one successor."""
    pieces: list[str] = []
    while reply:
        marker = next((marker for marker in MARKERS if reply.startswith(marker)), None)
        ends = [at for marker in MARKERS if (at := reply.find(marker)) > 0]
        limit = min([len(reply), *ends])
        size = len(marker) if marker else next((n for n in range(4, limit) if reply[:n] not in used), limit)
        piece = reply[:size]
        if piece in used:
            raise ValueError(f"the replies repeat {piece!r}")
        used.add(piece)
        pieces.append(piece)
        reply = reply[size:]
    return pieces


def _spelled(text: str) -> str:
    """Return a text in the characters that byte-level tokenizers write for its bytes."""
    return "".join(
        word for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    )


def _template(num_replies: int) -> str:
    choose = "".join(f"{{% if reply == {index} %}}<|reply_{index}|>{{% endif %}}" for index in range(num_replies))
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call>{}</tool_call><|im_end|>\n{% endif %}"
        "{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}"
        "{% set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
        f"{{% set reply = [results, {num_replies - 1}] | min if tools else {num_replies - 1} %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{choose}{{% endif %}}"
    )
