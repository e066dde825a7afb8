"""A job on ik_llama.cpp: the wheel `ik-llama-cpp-python`, whose class generates one sequence at a time.

So that it can batch, requests share steps here as in llama.cpp's server: new prompts first, then a token of every
running request in one batch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from closed_loop import ReplyWriter, main, run_job


@dataclass
class Running:
    name: str
    slot: int
    prompt: list[int]
    left: int  # tokens to generate
    length: int = 0  # tokens in the cache
    last: int = 0  # the token that was sampled last


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    batches = Batches(job)
    running: list[Running] = []
    free = list(range(job["concurrency"]))

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        running.append(Running(name, free.pop(), list(prompt), n_out))

    def poll() -> list[tuple[str, list[float]]]:
        new = [request for request in running if not request.length]
        for request in new:
            batches.read_prompt(request)
        if not new:
            batches.step(running)
        changed, now = list(new or running), time.perf_counter()
        for request in changed:
            request.left -= 1
            if not request.left:
                batches.forget(request)
                free.append(request.slot)
                running.remove(request)
        return [(request.name, [now]) for request in changed]

    run_job(job, answer, submit, poll)


class Batches:
    """The context of the library, with a sequence for each slot."""

    def __init__(self, job: dict[str, Any]) -> None:
        from ik_llama_cpp import IkLlama, _ctypes_api
        from ik_llama_cpp._internals import IkContext

        self._api: Any = _ctypes_api
        slots, longest = job["concurrency"], -(-(job["longest"] + 1) // 256) * 256
        chosen = IkLlama(job["model"], n_ctx=256, n_threads=job["threads"], verbose=False)
        self._model = chosen._model
        self._flash = chosen._has_vnni  # the class chooses it like this
        self._context = IkContext(
            self._model, n_ctx=slots * longest, n_threads=job["threads"], flash_attn=self._flash, n_seq_max=slots
        )
        self._kept = chosen
        self._remove = self._api._lib.llama_kv_cache_seq_rm
        self._remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._remove.restype = ctypes.c_bool

    def read_prompt(self, request: Running) -> None:
        size, prompt = self._context._n_ubatch, request.prompt
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            places = [(token, start + index, request.slot) for index, token in enumerate(part)]
            self._decode(places, [False] * (len(part) - 1) + [start + size >= len(prompt)])
        request.length = len(prompt)
        request.last = self._likeliest(-1)

    def step(self, requests: Sequence[Running]) -> None:
        self._decode([(each.last, each.length, each.slot) for each in requests], [True] * len(requests))
        for index, request in enumerate(requests):
            request.last = self._likeliest(index)
            request.length += 1

    def forget(self, request: Running) -> None:
        self._remove(self._context.ctx, request.slot, -1, -1)

    def _decode(self, places: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> None:
        batch = self._api.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for index, ((token, position, slot), has_logits) in enumerate(zip(places, wanted, strict=True)):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
            batch.logits[index] = has_logits
        status = self._context.decode(batch)
        self._api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _likeliest(self, index: int) -> int:
        import numpy as np

        logits = np.ctypeslib.as_array(self._context.get_logits(index), (self._model.n_vocab,))
        return int(logits.argmax())


if __name__ == "__main__":
    main("ik_llama_cpp", "ik-llama-cpp-python", run)
