"""`bench shapes` beside a peer: our engine, then the other, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.progress import Note
from chairlift_lab.common.floor import Ceilings
from chairlift_lab.common.model_shapes import config_file
from chairlift_lab.common.shape_run import Cases, ShapeCase, ShapeRun, make_cases, warm_up_of
from chairlift_lab.peers.peers import CHECK_SECONDS, PeerFailed, PeerProcess

OWN_PROGRAM = "run_chairlift.py"


class _Kind(NamedTuple):
    title: str
    program: str


_KINDS = {"vllm": _Kind("vLLM", "run_vllm_shapes.py")}
SHAPE_PEERS = tuple(_KINDS)


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
            answer = PeerProcess(self.python, _KINDS[self.name].program, CHECK_SECONDS).ask("--check")
        except PeerFailed as failure:
            raise InvalidParameter("peer_python", f"{self.python}: {failure}") from None
        if "version" not in answer:
            problem = f"{self.python} has no package {answer.get('missing')}: install it there, or name the Python"
            raise InvalidParameter("peer_python", f"{problem} that has it")
        return str(answer["version"])

    def compare(
        self, cases: Cases, note: Note, keep: Callable[[ShapeComparison], None] = lambda half: None
    ) -> ShapeComparison:
        """Run our engine, then the peer. Options are checked first.

        `keep` is called with our half as soon as it is complete, since the peer takes minutes and may be interrupted.
        """
        _refuse_other_formats(cases.config, self.title)
        version = self.version()
        own, start_seconds = run_own(cases, note)
        half = ShapeComparison(self, version, own, start_seconds)
        keep(half)
        answer: dict[str, Any] = {}
        drawn = make_cases(cases.names, own.vocabulary, cases.scale)
        failure = None
        try:
            self._run(cases, drawn, note, answer)
        except PeerFailed as error:
            failure = error
        return replace(half, theirs=valid_part(answer, len(drawn)), failure=failure)

    def _run(self, cases: Cases, drawn: Sequence[ShapeCase], note: Note, answer: dict[str, Any]) -> None:
        """Run the same cases in the same number format; `answer` also has what was completed before a failure."""
        from chairlift.engine.settings import resolve_machine

        config = cases.config
        job = {
            "dtype": str(resolve_machine(config).dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "prefix_caching": config.prefix_caching,
            "quantization": "fp8" if config.quantization == "fp8" else None,  # None: what its config.json names
            "kv_dtype": "fp8" if config.kv_dtype == "fp8" else "auto",
            "cases": [asdict(case) for case in drawn],
            "warm_ups": [asdict(warm_up_of(case)) for case in drawn],
        }
        environment = {"HF_HUB_OFFLINE": "1"} | only_this_gpu(config)
        process = PeerProcess(self.python, _KINDS[self.name].program, self.timeout, environment)
        with config_file(cases.shape, layers=cases.layers) as path, tempfile.TemporaryDirectory() as folder:
            source = Path(path).expanduser()
            shutil.copyfile(source / "config.json" if source.is_dir() else source, Path(folder) / "config.json")
            ask_with_notes(process, job | {"model": folder}, self.title, note, answer)
        for key in ("start_seconds", "seconds"):
            if key not in answer:
                raise PeerFailed(f"answered without {key!r}")
        if valid_part(answer, len(drawn)) is None or len(answer["seconds"]) != len(drawn):
            raise PeerFailed(f"answered {answer['seconds']} as the seconds of {len(drawn)} cases")


def valid_part(answer: Mapping[str, Any], num_cases: int) -> dict[str, Any] | None:
    """What there is of an answer, if it makes sense: the start, and the seconds of the cases that were completed."""
    seconds = answer.get("seconds", [])
    if "start_seconds" not in answer or len(seconds) > num_cases or not all(each > 0 for each in seconds):
        return None
    return {"start_seconds": answer["start_seconds"], "seconds": seconds}


@dataclass(frozen=True, slots=True)
class ShapeComparison:
    """Both runs; ours is complete even if the peer failed."""

    peer: ShapePeer
    version: str
    own: ShapeRun
    own_start_seconds: float  # Counted from the start of our process to its first token.
    theirs: Mapping[str, Any] | None = None  # the same of its process, and the seconds of each completed case
    failure: PeerFailed | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that a peer adds to the report."""
        start = None if self.theirs is None else self.theirs["start_seconds"]
        failure = None if self.failure is None else str(self.failure)
        peer = {"name": self.peer.name, "version": self.version, "start_seconds": start, "failure": failure}
        return {"start_seconds": self.own_start_seconds, "peer": peer}

    def rows(self) -> list[dict[str, Any]]:
        rows = [dict(row) for row in self.own.rows]
        for row, seconds in zip(rows, [] if self.theirs is None else self.theirs["seconds"], strict=False):
            row["peer_seconds"] = seconds
            row["peer_tokens_per_second"] = row["output_tokens"] / seconds
            row["times_peer"] = seconds / row["seconds"]
        return rows


def run_own(cases: Cases, note: Note) -> tuple[ShapeRun, float]:
    """`run_shape` in a process of its own, and the seconds from its start to its first token."""
    process = PeerProcess(Path(sys.executable), OWN_PROGRAM, threading.TIMEOUT_MAX)
    job = cases._asdict() | {"config": asdict(cases.config), "names": list(cases.names)}
    try:
        answer = ask_with_notes(process, job, "Chairlift", note)
    except PeerFailed as failure:
        raise ChairliftError(f"Chairlift {failure}") from None
    if "parameter" in answer:
        raise InvalidParameter(answer["parameter"], answer["problem"])
    if "problem" in answer:
        raise ChairliftError(answer["problem"])
    run = ShapeRun(answer["rows"], Ceilings(**answer["ceilings"]), answer["ready_seconds"], answer["vocabulary"])
    return run, answer["start_seconds"]


def ask_with_notes(
    process: PeerProcess, job: Mapping[str, Any], title: str, note: Note, answered: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a process and return its last line; `answered` collects the content of all lines, also before a failure."""

    def progress(line: dict[str, Any]) -> None:
        if answered is not None:
            answered.update(line)
        if "note" in line:
            note(f"{title}: {line['note']}")

    note(f"{title}: starting")
    return process.run(job, progress)


def _refuse_other_formats(config: EngineConfig, title: str) -> None:
    from chairlift.engine.settings import KV_DTYPES, resolve_machine

    allowed = ("none", "fp8", "checkpoint")  # the last: what the shape itself names
    if config.quantization not in allowed:
        raise InvalidParameter("quantization", f"cannot be compared: {title} has no such format; use one of {allowed}")
    if config.kv_dtype not in ("auto", "fp8") and KV_DTYPES[config.kv_dtype] != resolve_machine(config).dtype:
        raise InvalidParameter("kv_dtype", f"cannot be compared: {title}'s cache is in the type of --dtype, or in fp8")


def only_this_gpu(config: EngineConfig) -> dict[str, str]:
    """Environment variables that leave a process only the GPU that `config` names, or none."""
    from chairlift.engine.settings import resolve_machine

    if resolve_machine(config).device.type == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    index = config.device.partition(":")[2]
    if not index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": index if visible is None else visible.split(",")[int(index)].strip()}
