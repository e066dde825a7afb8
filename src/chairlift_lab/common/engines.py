"""Engines with different settings that share one loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.config import EngineConfig
from chairlift.progress import Note

if TYPE_CHECKING:
    from chairlift.attention.storage import KVStorage
    from chairlift.engine.engine import Engine
    from chairlift.engine.startup import LoadedModel, StartedEngine
    from chairlift.terminal.options import EngineOptions


def touch_cache(storage: KVStorage, num_blocks: int | None = None) -> None:
    """Write to the first blocks of the KV cache.

    The system allocates pages on first write; this moves that cost out of the first measured request.
    """
    import torch

    for side in (*storage.keys, *storage.values):
        side[:num_blocks].view(torch.uint8).zero_()


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Builds engines around a loaded model; `options` are fields of `EngineConfig`, which each engine may change."""

    loaded: LoadedModel
    options: Mapping[str, Any]

    @classmethod
    def load(cls, model: str, options: Mapping[str, Any], *, progress: bool = False) -> EngineMaker:
        from chairlift.engine.startup import load_model

        return cls(load_model(model, EngineConfig(**options), progress=progress), options)

    @classmethod
    def from_options(cls, engine: EngineOptions, note: Note, **changes: Any) -> EngineMaker:
        """Load the model that the options of a command name."""
        note(f"loading {engine.model}")
        return cls.load(engine.model, engine.config() | changes, progress=not engine.quiet)

    def start(self, *, clock: Callable[[], float] = time.monotonic, **changes: Any) -> StartedEngine:
        """Start an engine; `changes` override `options`."""
        from chairlift.engine.startup import start_engine

        return start_engine(self.loaded, self.config(**changes), clock=clock)

    def engine(self, *, clock: Callable[[], float] = time.monotonic, **changes: Any) -> Engine:
        return self.start(clock=clock, **changes).engine

    def config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(**(dict(self.options) | changes))

    def kv_memory(self, num_blocks: int) -> int:
        """The size of `num_blocks` blocks in bytes."""
        from chairlift.engine.memory_plan import bytes_per_token
        from chairlift.engine.settings import kv_dtype

        model, config = self.loaded.model, self.config()
        return num_blocks * config.block_size * bytes_per_token(model.attention_layers, kv_dtype(config, model))

    def vocabulary(self) -> list[int]:
        """All token ids but the special ones."""
        special = self.loaded.tokenizer.special_ids
        return [token for token in range(self.loaded.model.vocab_size) if token not in special]

    def num_parameters(self) -> int:
        """The number of weights, from the checkpoint's config."""
        from chairlift.engine.settings import resolve_machine
        from chairlift.loading.checkpoint import open_checkpoint
        from chairlift.loading.resolve import resolve_model
        from chairlift.models import describe
        from chairlift.models.dummy import DummyCheckpoint

        name, config = self.loaded.name, self.config()
        if config.load_format == "dummy":
            return describe(DummyCheckpoint(name, resolve_machine(config).device).config).num_parameters
        return describe(open_checkpoint(resolve_model(name)).config).num_parameters

    def settings(self) -> dict[str, Any]:
        """The settings that all engines share, for a report."""
        from chairlift.engine.settings import kv_dtype, resolve_machine

        config = self.config()
        settings = resolve_machine(config)
        return {
            "model": self.loaded.name,
            "device": str(settings.device),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "quantization": self.loaded.model.quantization,
            "kv_dtype": str(kv_dtype(config, self.loaded.model)).removeprefix("torch."),
            "threads": settings.threads,
            "block_size": config.block_size,
            "max_batch_tokens": settings.max_batch_tokens,
        }
