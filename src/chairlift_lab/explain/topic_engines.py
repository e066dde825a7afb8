"""Runs the engine for a topic: one loaded model, engines around it, and prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter
from chairlift_lab.explain.recording import Run, TimedRequest, record

if TYPE_CHECKING:
    from chairlift.engine.startup import LoadedModel, StartedEngine

Clock = Callable[[], float]
# The clock of pictures that show times: with `one_thread` it is not disturbed by other programs.
CPU_TIME: Clock = time.process_time

TEXT = (
    "A chairlift never stops for boarding. Skiers who reach the top step off, others get on at the bottom, and every "
    "chair that passes can carry somebody. A cable car is different: it waits until it is full, it leaves with all of "
    "them together, and nobody gets on or off before the end of the ride. Most of the time most of its places are "
    "empty. A server for language models can work in either of these two ways. It may collect questions until it has "
    "enough of them and answer them together, so that a short answer waits for the longest one. Or it may look at "
    "every single step who is done and who is new. The second way keeps the machine busy and lets nobody wait for a "
    "stranger. The price is book-keeping: whose tokens are these, where are their keys and values, and who may look "
    "at whom? All pictures of this guide are about that book-keeping, and every one of them is drawn from a run."
)


@dataclass(frozen=True, slots=True)
class TopicEngines:
    """Starts engines on the CPU in float32, so that pictures are the same on every machine."""

    loaded: LoadedModel

    @classmethod
    def load(cls, model: str, *, progress: bool = False) -> TopicEngines:
        from chairlift.config import EngineConfig
        from chairlift.engine.startup import load_model

        return cls(load_model(model, EngineConfig(device="cpu", dtype="float32"), progress=progress))

    @property
    def model_name(self) -> str:
        return self.loaded.name.rstrip("/").rsplit("/", 1)[-1]

    def start(
        self, *, num_blocks: int = 64, block_size: int = 16, clock: Clock = time.monotonic, **options: Any
    ) -> StartedEngine:
        """Start an engine with a KV cache of `num_blocks`; `options` are those of EngineConfig."""
        from chairlift_lab.common.engines import EngineMaker

        maker = EngineMaker(self.loaded, {"device": "cpu", "dtype": "float32", "block_size": block_size})
        return maker.start(
            clock=clock,
            kv_memory=maker.kv_memory(num_blocks),
            max_model_len=min(self.loaded.model.max_len, num_blocks * block_size),
            **options,
        )

    def record(self, requests: Sequence[TimedRequest], **options: Any) -> Run:
        """Record a run of these requests on a new engine."""
        return record(self.start(**options).engine, requests)

    def prompt(self, num_tokens: int, skip: int = 0) -> tuple[int, ...]:
        """The first `num_tokens` tokens of TEXT without its first `skip` words."""
        text = " ".join(TEXT.split()[skip:])
        tokens = self.loaded.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) < num_tokens:
            raise InvalidParameter("num_tokens", f"the text has {len(tokens)} tokens, not {num_tokens}")
        return tuple(tokens[:num_tokens])

    def labels(self, tokens: Sequence[int]) -> list[str]:
        """Each token as a short piece of text for a label."""
        return [as_label(self.loaded.tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the work is too small for more."""
    import numba
    import torch

    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


def as_label(text: str) -> str:
    """Text for a label: without characters that it cannot show and without surrounding spaces."""
    spelled = text.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", "·")
    shown = "".join(character if character.isprintable() else "·" for character in spelled)
    return shown.strip().replace("$", r"\$") or "␣"  # a dollar starts a formula in matplotlib
