"""Output tokens per second: this engine, itself without batching, and transformers, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter
from chairlift_lab.common.measure import Measurement, TokenProgress, add_speedups
from chairlift_lab.common.workload import Workload, text_like_ids

if TYPE_CHECKING:
    from chairlift.engine.settings import MachineSettings

ENGINES = ("chairlift", "one-at-a-time", "transformers")
OWN_ENGINES = ("chairlift", "chairlift-fp32")
ALL_ENGINES = tuple(dict.fromkeys(ENGINES + OWN_ENGINES))

Watch = Callable[[str], AbstractContextManager[TokenProgress]]
"""Shows the progress of the engine of that name."""


@dataclass(frozen=True, slots=True)
class ThroughputComparison:
    """Engines to run on one model; `options` are fields of `EngineConfig`.

    All requests are submitted at once. With `closed_loop`, our own engines get at most as many as they have slots, and
    the next when one has finished.
    """

    model: str
    engines: Sequence[str] = ENGINES
    options: Mapping[str, Any] = field(default_factory=dict)
    progress: bool = True  # of downloading the model
    closed_loop: bool = False

    def run(self, workload: Workload, watch: Watch) -> list[dict[str, Any]]:
        """Load, warm up and measure one engine after the other; return a row for each."""
        import torch

        runs = {
            "chairlift": self._run_batched,
            "chairlift-fp32": self._run_fp32,
            "one-at-a-time": self._run_one_at_a_time,
            "transformers": self._run_transformers,
        }
        self._require_accelerate()
        threads = torch.get_num_threads()
        rows = []
        for name in self.engines:
            torch.set_num_threads(threads)  # the engine before may have changed it
            with watch(name) as advance:
                rows.append(runs[name](workload, advance).row(name))
            gc.collect()
        add_speedups(rows)
        return rows

    def slots(self) -> int:
        """The most requests per step."""
        return self._machine().max_batch_requests

    def settings(self) -> dict[str, Any]:
        """The settings with all defaults resolved."""
        config, machine = self._config(), self._machine()
        return {
            "model": self.model,
            "engines": list(self.engines),
            "threads": machine.threads,
            "device": str(machine.device),
            "dtype": str(machine.dtype).removeprefix("torch."),
            "quantization": config.quantization,
            "concurrency": machine.max_batch_requests,
            "max_model_len": config.max_model_len,
            "max_batch_tokens": machine.max_batch_tokens,
            "max_prefill_tokens": config.max_prefill_tokens or machine.max_batch_tokens,
            "block_size": config.block_size,
            "kv_memory": config.kv_memory,
            "prefix_caching": config.prefix_caching,
            "attention": config.attention,
            "transformers_max_batch_tokens": self._transformers_batch_tokens(),
        }

    def vocabulary(self) -> list[int]:
        """The token ids that prompts can be made of."""
        from chairlift.loading.checkpoint import open_checkpoint
        from chairlift.loading.resolve import resolve_model
        from chairlift.loading.tokenizer import load_tokenizer

        checkpoint = open_checkpoint(resolve_model(self.model, progress=self.progress))
        return text_like_ids(load_tokenizer(checkpoint).tokenizer)

    def _require_accelerate(self) -> None:
        """Raise before the measurement if transformers could not load the model."""
        from chairlift.loading.resolve import resolve_model

        if "transformers" not in self.engines or find_spec("accelerate") is not None:
            return
        if resolve_model(self.model, progress=self.progress).suffix == ".gguf":
            problem = (
                "transformers needs the package accelerate to read GGUF files; install it or leave transformers out"
            )
            raise InvalidParameter("engines", problem)

    def _config(self, **changes: Any) -> Any:
        from chairlift.config import EngineConfig

        return EngineConfig(**(dict(self.options) | changes))

    def _machine(self, **changes: Any) -> MachineSettings:
        from chairlift.engine.settings import resolve_machine

        return resolve_machine(self._config(**changes))

    def _run_batched(self, workload: Workload, advance: TokenProgress, **changes: Any) -> Measurement:
        from chairlift.engine.startup import load_engine
        from chairlift_lab.common.engine_run import measure_engine

        config = self._config(**changes)
        loaded = load_engine(self.model, config, progress=self.progress)
        in_flight = self._machine(**changes).max_batch_requests if self.closed_loop else None
        return measure_engine(loaded.engine, workload, advance, in_flight=in_flight)

    def _run_fp32(self, workload: Workload, advance: TokenProgress) -> Measurement:
        return self._run_batched(workload, advance, quantization="none", dtype="float32")

    def _run_one_at_a_time(self, workload: Workload, advance: TokenProgress) -> Measurement:
        """The same engine with one slot."""
        return self._run_batched(workload, advance, max_batch_requests=1, prefix_caching=False)

    def _run_transformers(self, workload: Workload, advance: TokenProgress) -> Measurement:
        from chairlift.loading.resolve import resolve_model
        from chairlift_lab.peers.transformers_run import TransformersSetup, measure_transformers

        machine = self._machine()
        setup = TransformersSetup(
            checkpoint=resolve_model(self.model, progress=self.progress),
            dtype=machine.dtype,
            device=machine.device,
            max_batch_tokens=self._transformers_batch_tokens(),
            max_batch_requests=machine.max_batch_requests,
        )
        return measure_transformers(setup, workload, advance)

    def _transformers_batch_tokens(self) -> int:
        from chairlift_lab.peers.transformers_run import MAX_BATCH_TOKENS

        return self.options.get("max_batch_tokens") or MAX_BATCH_TOKENS
