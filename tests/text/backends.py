"""Small tokenizers of every kind that real models use, trained here so that no test needs a download."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The chairlift never stops for boarding: finished riders step off, waiting ones get on.",
    "Ein Sessellift hält nie an; wer fertig ist, steigt ab. Größe, Maß, Überfluß, naïve café.",
    "缆车从不停下来等人上车。完成的乘客下车。等候的乘客上车。",
    "def step(plan):\n    return [run(chunk) for chunk in plan]  # 👍🏽 emoji, ٣ digits, עברית",
] * 3


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2."""
    return Tokenizer.from_str(_byte_level())


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Added tokens that are not special, one with characters that encode no byte.
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("▁ wide ▁", special=False)])
    return tokenizer.to_str()


def byte_fallback(*, strip: bool) -> Tokenizer:
    """As Llama 2 and Mistral (strip) and Gemma (no strip): ▁ for a space, <0xE2> for a byte."""
    words = ["▁The", "▁lift", "▁never", "▁stops", "▁", "▁▁", "▁▁▁", "é", "!", "\n", "缆车"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in [*words, *"abcdefghijklmnopqrstuvwxyzTL"]:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and older SentencePiece conversions."""
    words = ["<unk>", "</s>", "▁", "▁▁", "▁the", "▁lift", "s", "ing", "▁never", "é"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: the space depends on the next token."""
    words = ["[UNK]", "[CLS]", "the", "lift", "##s", "##ing", "never", "stop", "é"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None  # type: ignore[assignment]
    return tokenizer


def unusual_order() -> Tokenizer:
    """Byte fallback before the replacement: bytes that spell ▁ become a space too."""
    tokenizer = byte_fallback(strip=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    return tokenizer


ALL = {
    "byte level": byte_level,
    "byte fallback, strip": lambda: byte_fallback(strip=True),
    "byte fallback": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word piece": word_piece,
    "no decoder": no_decoder,
    "unusual order": unusual_order,
}
