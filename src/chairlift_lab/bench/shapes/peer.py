"""Our engine and a peer on the cases of one shape, one after the other.

Each runs in a process of its own: both take nearly all memory of a GPU, and only the end of a process surely frees it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.settings import KV_DTYPES, resolve_machine
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.progress import Note
from chairlift_lab.bench.shapes.run import CaseResult, ShapeCase, ShapeRun, make_cases, warm_up_of
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.model_shapes import config_file
from chairlift_lab.peers.process import PeerFailed, PeerProcess

CHECK_SECONDS = 60.0
OWN_PROGRAM = "run_chairlift_shapes.py"


@dataclass(frozen=True, slots=True)
class _Kind:
    title: str
    program: str


_KINDS = {"vllm": _Kind("vLLM", "run_vllm_shapes.py")}
SHAPE_PEERS = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class PeerRun:
    start_seconds: float  # from the start of its process to its first token
    seconds: list[float]  # of each case, in order; of the completed ones if it failed


@dataclass(frozen=True, slots=True)
class ShapePeer:
    """A peer; `python` has its package."""

    name: str
    python: Path = Path(sys.executable)
    timeout: float = 1800.0  # seconds for all cases, loading included

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise InvalidParameter("peer", f"there is no {self.name!r}; choose from {', '.join(SHAPE_PEERS)}")
        if not self.python.exists():
            raise InvalidParameter("peer_python", f"there is no {str(self.python)!r}")
        if not self.timeout > 0:
            raise InvalidParameter("peer_timeout", f"must be above 0, got {self.timeout:g}")

    @property
    def title(self) -> str:
        return _KINDS[self.name].title

    def version(self) -> str:
        """The version of its package; raises if it is not installed."""
        try:
            found = PeerProcess(self.python, _KINDS[self.name].program, CHECK_SECONDS).ask("--check")
        except PeerFailed as failure:
            raise InvalidParameter("peer_python", f"{self.python}: {failure}") from None
        if "version" not in found:
            problem = f"{self.python} has no package {found.get('missing')}: install it there, or name the Python"
            raise InvalidParameter("peer_python", f"{problem} that has it")
        return str(found["version"])

    def compare(
        self,
        shape: str,
        config: EngineConfig,
        cases: Sequence[str],
        note: Note,
        *,
        scale: int = 1,
        layers: int | None = None,
        keep: Callable[[ShapeComparison], None] = lambda half: None,
    ) -> ShapeComparison:
        """Run our engine, then the peer. Options are checked first.

        `keep` is called with our half as soon as it is complete, since the peer takes minutes and may be interrupted.
        """
        _refuse_other_formats(config, self.title)
        version = self.version()
        own, start_seconds = _run_own(shape, config, cases, note, scale=scale, layers=layers)
        half = ShapeComparison(self, version, own, start_seconds, None)
        keep(half)
        theirs, failure = self._run(shape, config, make_cases(cases, own.vocabulary, scale), note, layers)
        return replace(half, theirs=theirs, failure=failure)

    def _run(
        self, shape: str, config: EngineConfig, cases: Sequence[ShapeCase], note: Note, layers: int | None
    ) -> tuple[PeerRun | None, PeerFailed | None]:
        """Run the same cases in the same number format; after a failure, return the completed ones."""
        job = {
            "dtype": str(resolve_machine(config).dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "prefix_caching": config.prefix_caching,
            "quantization": "fp8" if config.quantization == "fp8" else None,  # None: what its config.json names
            "kv_dtype": "fp8" if config.kv_dtype == "fp8" else "auto",
            "cases": [asdict(case) for case in cases],
            "warm_ups": [asdict(warm_up_of(case)) for case in cases],
        }
        environment = {"HF_HUB_OFFLINE": "1"} | _only_this(config)
        process = PeerProcess(self.python, _KINDS[self.name].program, self.timeout, environment)
        with config_file(shape, layers=layers) as path, tempfile.TemporaryDirectory() as folder:
            source = Path(path).expanduser()
            shutil.copyfile(source / "config.json" if source.is_dir() else source, Path(folder) / "config.json")
            answer: dict[str, Any] = {}
            try:
                _ask(process, job | {"model": folder}, self.title, note, answer)
                _check_answer(answer, len(cases))
            except PeerFailed as failure:
                return _finished(answer, len(cases)), failure
        return PeerRun(answer["start_seconds"], answer["seconds"]), None


def _finished(answer: Mapping[str, Any], num_cases: int) -> PeerRun | None:
    """What there is of an answer, if it makes sense."""
    seconds = answer.get("seconds", [])
    if "start_seconds" not in answer or len(seconds) > num_cases or not all(one > 0 for one in seconds):
        return None
    return PeerRun(answer["start_seconds"], seconds)


def _check_answer(answer: Mapping[str, Any], num_cases: int) -> None:
    for key in ("start_seconds", "seconds"):
        if key not in answer:
            raise PeerFailed(f"answered without {key!r}")
    seconds = answer["seconds"]
    if len(seconds) != num_cases or not all(one > 0 for one in seconds):
        raise PeerFailed(f"answered {seconds} as the seconds of {num_cases} cases")


@dataclass(frozen=True, slots=True)
class ShapeComparison:
    """Both runs; ours is complete even if the peer failed."""

    peer: ShapePeer
    version: str
    own: ShapeRun
    own_start_seconds: float  # from the start of our process to its first token
    theirs: PeerRun | None
    failure: PeerFailed | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that a peer adds to the report."""
        start = None if self.theirs is None else self.theirs.start_seconds
        failure = None if self.failure is None else str(self.failure)
        peer = {"name": self.peer.name, "version": self.version, "start_seconds": start, "failure": failure}
        return {"start_seconds": self.own_start_seconds, "peer": peer}

    def rows(self) -> list[dict[str, Any]]:
        rows = [result.row() for result in self.own.results]
        for row, seconds in zip(rows, [] if self.theirs is None else self.theirs.seconds, strict=False):
            row["peer_seconds"] = seconds
            row["peer_tokens_per_second"] = row["output_tokens"] / seconds
            row["times_peer"] = seconds / row["seconds"]
        return rows

    def times(self) -> tuple[str, list[float]] | None:
        """For a plot: the peer's title and our speed as a multiple of its speed in each case, if it ran them all."""
        if self.theirs is None or self.failure is not None:
            return None
        return self.peer.title, [row["times_peer"] for row in self.rows()]


def _run_own(
    shape: str, config: EngineConfig, cases: Sequence[str], note: Note, *, scale: int = 1, layers: int | None = None
) -> tuple[ShapeRun, float]:
    """`run_shape` in a process of its own, and the seconds from its start to its first token."""
    process = PeerProcess(Path(sys.executable), OWN_PROGRAM, threading.TIMEOUT_MAX)
    job = {"shape": shape, "config": asdict(config), "cases": list(cases), "scale": scale, "layers": layers}
    try:
        answer = _ask(process, job, "Chairlift", note)
    except PeerFailed as failure:
        raise ChairliftError(f"Chairlift {failure}") from None
    if "parameter" in answer:
        raise InvalidParameter(answer["parameter"], answer["problem"])
    if "problem" in answer:
        raise ChairliftError(answer["problem"])
    results = [CaseResult(**result) for result in answer["results"]]
    run = ShapeRun(results, Ceilings(**answer["ceilings"]), answer["ready_seconds"], answer["vocabulary"])
    return run, answer["start_seconds"]


def _ask(
    process: PeerProcess, job: Mapping[str, Any], title: str, note: Note, answered: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a process and return its last line; `answered` collects the content of all lines, also before a failure."""

    def progress(line: dict[str, Any]) -> None:
        if answered is not None:
            answered.update(line)
        if "note" in line:
            note(f"{title}: {line['note']}")

    note(f"{title}: starting")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
        return process.ask(str(file), progress=progress)


def _refuse_other_formats(config: EngineConfig, title: str) -> None:
    allowed = ("none", "fp8", "checkpoint")  # the last: what the shape itself names
    if config.quantization not in allowed:
        raise InvalidParameter("quantization", f"cannot be compared: {title} has no such format; use one of {allowed}")
    if config.kv_dtype not in ("auto", "fp8") and KV_DTYPES[config.kv_dtype] != resolve_machine(config).dtype:
        raise InvalidParameter("kv_dtype", f"cannot be compared: {title}'s cache is in the type of --dtype, or in fp8")


def _only_this(config: EngineConfig) -> dict[str, str]:
    """Environment variables that leave a process only the GPU that `config` names, or none."""
    if resolve_machine(config).device.type == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    index = config.device.partition(":")[2]
    if not index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": index if visible is None else visible.split(",")[int(index)].strip()}
