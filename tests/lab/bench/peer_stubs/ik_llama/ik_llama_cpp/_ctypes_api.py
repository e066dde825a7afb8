from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stub_log import log

SEQUENCES: dict[int, list[int]] = {}
LIKELIEST = 3


def _remove(context: int, sequence: int, first: int, end: int) -> bool:
    tokens = SEQUENCES.pop(sequence)
    while tokens[-1] == LIKELIEST:  # generated
        tokens.pop()
    log(request={"prompt": tokens})
    return True


_lib = SimpleNamespace(llama_kv_cache_seq_rm=_remove)


def llama_batch_init(size: int, embedding: int, sequences: int) -> Any:
    numbers = ("token", "pos", "n_seq_id", "logits")
    return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **{name: [0] * size for name in numbers})


def llama_batch_free(batch: Any) -> None:
    return
