"""The adapters of an engine: registered, loaded in a thread while others are served, and chosen by requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from chairlift.config import MAX_LORAS, EngineConfig, parse_adapters
from chairlift.core.adapters import Adapter, AdapterPool, AdapterUse
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.adapters import PlacedAdapter
from chairlift.loading.adapter_file import AdapterFile, open_adapter
from chairlift.models.adapters import adapters_obstacle, attach_adapters
from chairlift.models.base import CausalLM
from chairlift.models.decoder import Decoder
from chairlift.options import format_bytes, parse_bytes
from chairlift.runner.memory import free_memory

log = logging.getLogger("chairlift")

SHARE_OF_MEMORY = 1 / 16  # Adapters may take this share of what is free beside the weights.
MAX_NAME = 200
LOADERS = 2  # threads: one reads from the disk while the other one converts


def open_configured(config: EngineConfig) -> dict[str, AdapterFile]:
    """Open the adapters that a config names; raises before a model is loaded."""
    return {name: open_adapter(path) for name, path in parse_adapters(config.lora or {}).items()}


def make_adapters(config: EngineConfig, model: CausalLM) -> EngineAdapters | None:
    """The adapters of an engine; None if the config has none and leaves no room for later ones."""
    if not config.lora and not config.max_loras:
        return None
    obstacle = adapters_obstacle(model)
    if obstacle is not None:
        raise InvalidParameter("lora", f"is not possible: {obstacle}")
    assert isinstance(model, Decoder)
    if model.adapters.is_attached:
        raise InvalidParameter("lora", "another engine of this process has adapters on this model")
    if config.lora_memory is None:
        num_bytes = int(free_memory(model.device) * SHARE_OF_MEMORY)
    else:
        num_bytes = parse_bytes("lora_memory", config.lora_memory)
    adapters = EngineAdapters(model, AdapterPool(config.max_loras or MAX_LORAS, num_bytes))
    for name, file in open_configured(config).items():
        adapters.pool.register(adapters.describe(name, file))
    names = len(adapters.pool.names)
    log.info(f"adapters   {names:,} registered, up to {adapters.pool.max_slots} in {format_bytes(num_bytes)} of memory")
    return adapters


class EngineAdapters:
    """Moves adapters between disk and the model, as the pool of the scheduler asks for them."""

    def __init__(self, model: Decoder, pool: AdapterPool) -> None:
        self.pool = pool
        self._bank = model.adapters
        self._is_on_gpu = on_gpu(model.device)
        self._bytes_per_number = model.dtype.itemsize if self._is_on_gpu else 4
        self._fitting = attach_adapters(model, pool.max_slots)
        self._threads = ThreadPoolExecutor(LOADERS, thread_name_prefix="chairlift-adapters")
        self._loading: dict[Adapter, Future[Callable[[], PlacedAdapter]]] = {}

    # ---- names ----------------------------------------------------------------------------------------------------

    def read(self, name: str, path: str | Path) -> Adapter:
        """Read what an adapter is; raises if the model cannot have it. May be called in any thread."""
        return self.describe(name, open_adapter(path))

    def describe(self, name: str, file: AdapterFile) -> Adapter:
        check_name(name)
        self._fitting.check(file)
        num_bytes = self._fitting.num_numbers(file) * self._bytes_per_number
        return Adapter(name, file.version, num_bytes, str(file.path), file.max_rank)

    def load(self, name: str, path: str | Path) -> Adapter:
        """Register an adapter under a name, in place of the one that has it; the same content changes nothing."""
        adapter = self.read(name, path)
        self.register(adapter)
        return adapter

    def register(self, adapter: Adapter) -> None:
        known = next((each for each in self.pool.registered if each.name == adapter.name), None)
        if known is None or (known.version, known.path) != (adapter.version, adapter.path):
            self.pool.register(adapter)

    def resolve(self, lora: Any) -> tuple[AdapterUse, ...]:
        """The adapters that a request names: one, a mapping of names to weights, or something with vLLM's fields."""
        if lora is None:
            return ()
        weights: Mapping[Any, Any] = lora if isinstance(lora, Mapping) else {getattr(lora, "lora_name", lora): 1.0}
        uses = []
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) < 1e4:
                raise InvalidParameter("lora", f"the weight of {name!r:.100} must be a number, got {weight!r:.40}")
            if not isinstance(name, str):
                raise InvalidParameter("lora", f"must name adapters, got {name!r:.100}")
            adapter = self.pool.find(name)
            if weight:
                uses.append(AdapterUse(adapter, float(weight)))
        self.pool.check(uses)
        return tuple(sorted(uses, key=lambda use: use.adapter.name))

    # ---- memory ---------------------------------------------------------------------------------------------------

    def advance(self) -> list[tuple[Adapter, Exception]]:
        """Free what is evicted, place what was read, and start to read what is asked for; return what failed."""
        for slot in self.pool.take_drops():
            self._bank.drop(slot)
        failed: list[tuple[Adapter, Exception]] = []
        for adapter, future in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[adapter]
            try:
                placed = future.result()()
            except Exception as error:  # Whatever is wrong with a file must not stop the others.
                self.pool.failed(adapter)
                failed.append((adapter, error))
                continue
            adapter.num_bytes = placed.num_bytes
            self._bank.put(adapter.slot, placed)
            self.pool.loaded(adapter)
        for adapter in self.pool.take_loads():
            self._loading[adapter] = self._threads.submit(self._read, adapter)
        return failed

    @torch.inference_mode()
    def _read(self, adapter: Adapter) -> Callable[[], PlacedAdapter]:
        """Read an adapter; return what places it. On a CPU it is placed here, since that takes long for the thread of
        the steps; on a GPU another thread must not allocate memory while a graph is captured."""
        file = open_adapter(adapter.path)
        if file.version != adapter.version:
            raise CorruptCheckpoint(f"{adapter.path} has changed since it was registered as {adapter.name!r}")
        self._fitting.check(file)
        packed = self._fitting.pack(file)
        if self._is_on_gpu:
            return lambda: self._bank.placed(packed)
        placed = self._bank.placed(packed)
        return lambda: placed

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def wait(self, seconds: float) -> None:
        """Wait until an adapter has been read, at most `seconds`."""
        if self._loading:
            wait(list(self._loading.values()), seconds, return_when="FIRST_COMPLETED")

    def shut_down(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise InvalidParameter("lora", f"a name must be 1 to {MAX_NAME} printable characters, got {name!r:.100}")
