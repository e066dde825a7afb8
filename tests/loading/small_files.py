"""Small valid files to damage, and a check that a damaged one loads or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import strategies as st

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.tokenizer import load_tokenizer
from tests.loading.gguf_writing import add_tensor, finish

TOKENS = ["<s>", "</s>", "<|im_end|>", "a", "b", "c", "Ġ", "ab", "Ġa", "Ġab"]
MERGES = ["a b", "Ġ a", "Ġ ab"]


def write_small_gguf(path: Path, edit: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    """One llama layer of width 32, quantised in several ways, with a vocabulary of ten tokens.

    `edit` may change the writer before the file is written.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv([1])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("general.languages", ["en", "de"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    generator = np.random.default_rng(0)
    for name, rows, kind in (
        ("token_embd.weight", 10, "Q8_0"),
        ("blk.0.attn_q.weight", 32, "Q4_0"),
        ("blk.0.attn_k.weight", 16, "Q4_1"),
        ("blk.0.attn_v.weight", 16, "F16"),
        ("blk.0.attn_output.weight", 32, "BF16"),
        ("blk.0.ffn_up.weight", 32, "Q5_0"),
    ):
        values = generator.standard_normal((rows, 32), np.float32)
        add_tensor(writer, name, values, GGMLQuantizationType[kind])
    add_tensor(writer, "output_norm.weight", np.ones(32, np.float32), GGMLQuantizationType.F32)
    edit(writer)
    finish(writer)
    return path


def loads_or_is_refused(path: Path) -> bool:
    """Read everything; any error must be one of our types."""
    try:
        checkpoint = open_checkpoint(path)
        assert [name for name, _ in checkpoint.tensors()] == checkpoint.names()
        load_tokenizer(checkpoint).tokenizer.encode("a b<s>")
    except (CorruptCheckpoint, UnsupportedModel):
        return False
    return True


Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Truncate the file or overwrite some bytes."""
    if draw(st.booleans()):
        share = draw(st.floats(0, 1, exclude_max=True))
        return lambda content: content[: int(share * len(content))]
    byte = st.one_of(st.sampled_from([0, 1, 8, 9, 127, 128, 255]), st.integers(0, 255))
    changes = draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), byte), min_size=1, max_size=8))

    def overwrite(content: bytes) -> bytes:
        damaged = bytearray(content)
        for share, value in changes:
            damaged[int(share * len(damaged))] = value
        return bytes(damaged)

    return overwrite
