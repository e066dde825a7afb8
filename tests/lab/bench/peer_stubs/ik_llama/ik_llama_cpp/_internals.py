from __future__ import annotations

import ctypes
from typing import Any

from stub_log import log

from ik_llama_cpp._ctypes_api import SEQUENCES


class IkModel:
    n_vocab = 8


class IkContext:
    ctx = 0
    _n_ubatch = 2

    def __init__(self, model: IkModel, **options: Any) -> None:
        log(options=options)

    def decode(self, batch: Any) -> int:
        for index in range(batch.n_tokens):
            tokens = SEQUENCES.setdefault(batch.seq_id[index][0], [])
            assert batch.pos[index] == len(tokens), "a sequence was not forgotten, or has a gap"
            tokens.append(batch.token[index])
        return 0

    def get_logits(self, index: int) -> Any:
        return (ctypes.c_float * 8)(0, 0, 0, 1)
