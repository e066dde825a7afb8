"""Engines on the same requests: ours in several forms, transformers, and peers, in rounds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from chairlift.errors import EngineDead, InvalidParameter
from chairlift_lab.common.engines import Measurement, TokenProgress, add_speedups, measure_engine
from chairlift_lab.common.workload import Workload, text_like_ids
from chairlift_lab.peers.peers import MAX_BATCH_TOKENS, Peer, PeerFailed

if TYPE_CHECKING:
    from chairlift.engine.settings import MachineSettings

ENGINES = ("chairlift", "one-at-a-time", "transformers")
OWN_ENGINES = ("chairlift", "chairlift-fp32")
ALL_ENGINES = tuple(dict.fromkeys(ENGINES + OWN_ENGINES))
# The fields of `EngineConfig` in which engines of ours differ from the options.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "chairlift": {},
    "chairlift-fp32": {"quantization": "none", "dtype": "float32"},
    "one-at-a-time": {"max_batch_requests": 1, "prefix_caching": False},
}

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
    progress: bool = True  # Whether downloading the model shows progress.
    closed_loop: bool = False

    def run(self, workload: Workload, watch: Watch) -> list[dict[str, Any]]:
        """Load, warm up and measure one engine after the other; return a row for each."""
        import torch

        self._require_accelerate()
        threads = torch.get_num_threads()
        rows = []
        for name in self.engines:
            torch.set_num_threads(threads)  # the engine before may have changed it
            with watch(name) as advance:
                if name == "transformers":
                    measured = self._run_transformers(workload, advance)
                else:
                    measured = self._run_own(workload, advance, CHANGES[name])
                rows.append(measured.row(name))
            gc.collect()
            if torch.cuda.is_initialized():  # the next engine may be in another process
                torch.cuda.empty_cache()
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

    def _run_own(self, workload: Workload, advance: TokenProgress, changes: Mapping[str, Any]) -> Measurement:
        from chairlift.engine.startup import load_engine

        loaded = load_engine(self.model, self._config(**changes), progress=self.progress)
        in_flight = self._machine(**changes).max_batch_requests if self.closed_loop else None
        return measure_engine(loaded.engine, workload, advance, in_flight=in_flight)

    def _run_transformers(self, workload: Workload, advance: TokenProgress) -> Measurement:
        """All requests at once, as for our own engines; transformers puts as many as fit into a step."""
        from chairlift.loading.resolve import resolve_model

        machine = self._machine()
        peer = Peer(
            "transformers",
            resolve_model(self.model, progress=self.progress),
            threads=machine.threads,
            dtype=str(machine.dtype).removeprefix("torch."),
            timeout=threading.TIMEOUT_MAX,
            device=str(machine.device),
            max_batch_tokens=self._transformers_batch_tokens(),
        )
        everything = len(workload.requests)
        try:
            return peer.measure(workload, min(machine.max_batch_requests, everything), advance, in_flight=everything)
        except PeerFailed as failure:
            raise EngineDead(f"transformers {failure}; run with --engines without it") from None

    def _transformers_batch_tokens(self) -> int:
        return self.options.get("max_batch_tokens") or MAX_BATCH_TOKENS


Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConcurrencyResult:
    """The rows of one concurrency, and why peers have none."""

    concurrency: int
    rows: list[Row]
    skipped: dict[str, str]  # The reason for each peer, by name.


@dataclass(frozen=True)
class Rounds:
    """Every round runs each engine once, so that a slow phase of the machine affects all of them."""

    own: ThroughputComparison
    peers: Sequence[Peer] = ()
    concurrencies: Sequence[int | None] = (None,)  # None: the engine's default
    repeat: int = 1

    @cached_property
    def versions(self) -> dict[str, str | PeerFailed]:
        """The version of each peer, or why it cannot run."""
        return {peer.name: self._version(peer) for peer in self.peers}

    def run(self, workload: Workload, watch: Watch) -> Iterator[ConcurrencyResult]:
        for concurrency in self.concurrencies:
            changes = {} if concurrency is None else {"max_batch_requests": concurrency}
            yield self._run_one(replace(self.own, options=dict(self.own.options) | changes), workload, watch)

    def _run_one(self, own: ThroughputComparison, workload: Workload, watch: Watch) -> ConcurrencyResult:
        slots = own.slots()
        runs: dict[str, list[Row]] = {}
        skipped = {name: str(version) for name, version in self.versions.items() if isinstance(version, PeerFailed)}
        for _ in range(self.repeat):
            for row in own.run(workload, watch):
                runs.setdefault(row["name"], []).append(row)
            for peer in self.peers:
                if peer.name in skipped:
                    continue
                try:
                    with watch(peer.name) as advance:
                        row = peer.measure(workload, slots, advance).row(peer.name)
                    runs.setdefault(peer.name, []).append(row)
                except PeerFailed as failure:
                    skipped[peer.name] = str(failure)
        rows = [median_row(some) for name, some in runs.items() if name not in skipped]
        self._compare(rows, slots)
        return ConcurrencyResult(slots, rows, skipped)

    def _compare(self, rows: list[Row], slots: int) -> None:
        add_speedups(rows)
        names = {peer.name for peer in self.peers}
        best = max((row["output_tokens_per_s"] for row in rows if row["name"] in names), default=None)
        for row in rows:
            row["concurrency"] = slots
            row["vs_best_peer"] = row["output_tokens_per_s"] / best if best else None

    @staticmethod
    def _version(peer: Peer) -> str | PeerFailed:
        try:
            return peer.version()
        except PeerFailed as failure:
            return failure


def median_row(rows: Sequence[Row]) -> Row:
    """The median of each figure over several runs of one engine; figures that an engine does not have stay None."""
    numeric = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    middle = {name: median(row[name] for row in rows) for name in numeric}
    return rows[0] | middle | {"output_tokens_per_s_runs": [row["output_tokens_per_s"] for row in rows]}
