"""The same load on the engine without a server, in a process of its own (`peers/programs/shapes.py`)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.core.events import Event, RequestAdmitted, RequestFinished, TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import EngineDead
from chairlift_lab.common.workload import BenchRequest, Workload
from chairlift_lab.load.client import ClosedLoop, LoadLoop, LoadProgress, LoadRecord, LoadRun, OpenLoop
from chairlift_lab.peers.peers import PeerFailed, PeerProcess

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

REPORT_SECONDS = 0.25


def run_offline(
    model: str, options: Mapping[str, Any], workload: Workload, loop: LoadLoop, warm_up: int, advance: LoadProgress
) -> LoadRun:
    """Run `workload` on an engine in a new process; `advance` is called with its progress."""
    times = loop.times() if isinstance(loop, OpenLoop) else None
    job = {
        "model": model,
        "options": dict(options),
        "requests": [[request.prompt_ids, request.n_out] for request in workload.requests],
        "warm_up": warm_up,
        "concurrency": loop.concurrency if isinstance(loop, ClosedLoop) else None,
        "times": None if times is None else [time for time, _ in zip(times, workload.requests, strict=False)],
    }

    def progress(line: dict[str, Any]) -> None:
        if "progress" in line:
            advance(*line["progress"])

    process = PeerProcess(Path(sys.executable), "shapes.py", "chairlift", threading.TIMEOUT_MAX)
    try:
        answer = process.run(job, progress)
    except PeerFailed as failure:
        raise EngineDead(f"the offline engine failed: {failure}") from None
    if "problem" in answer:
        raise EngineDead(f"the offline engine failed: {answer['problem']}")
    return LoadRun(answer["seconds"], [LoadRecord(**record) for record in answer["records"]], answer["cpu_seconds"])


def run_in_this_process(job: Mapping[str, Any], report: LoadProgress) -> LoadRun:
    """A warm-up, then the load of a job; `report` is called now and then."""
    from chairlift.config import EngineConfig
    from chairlift.engine.startup import load_engine

    last_report = 0.0

    def advance(*progress: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            report(*progress)

    engine = load_engine(job["model"], EngineConfig(**job["options"]), progress=False).engine
    requests = [BenchRequest(tuple(prompt), n_out) for prompt, n_out in job["requests"]]
    loop: LoadLoop = ClosedLoop(job["concurrency"]) if job["times"] is None else OpenLoop(lambda: iter(job["times"]))
    warm_up = Workload(tuple(requests)).warm_up(job["warm_up"])
    OfflineLoad(engine, warm_up.requests, ClosedLoop(len(warm_up.requests) or 1)).run(lambda *progress: None)
    return OfflineLoad(engine, requests, loop).run(advance)


class OfflineLoad:
    """Submits requests to an engine at the rate of the load's loop."""

    def __init__(self, engine: Engine, requests: Sequence[BenchRequest], loop: LoadLoop) -> None:
        self._num_pieces = self._num_done = 0
        self._engine = engine
        self._queue = list(reversed(requests))
        self._max_open = loop.concurrency if isinstance(loop, ClosedLoop) else len(requests)
        self._times = loop.times() if isinstance(loop, OpenLoop) else None
        self._due = 0.0
        self._open: dict[str, LoadRecord] = {}
        self._start_time = 0.0

    def run(self, advance: LoadProgress) -> LoadRun:
        cpu, records = time.process_time(), list[LoadRecord]()
        self._start_time = self._engine.now()
        self._due = next(self._times) if self._times else 0.0
        while self._queue or self._open:
            records += self._submit_due()
            if self._engine.has_work:
                self._record(self._engine.step())
                self._engine.check_alive()
                advance(self._num_done, len(self._open), self._num_pieces)
            elif self._queue:
                time.sleep(max(0.0, self._due - self._now()))
        seconds = max((record.end for record in records), default=0.0)
        return LoadRun(seconds, records, {"engine": time.process_time() - cpu})

    def _now(self) -> float:
        return self._engine.now() - self._start_time

    def _submit_due(self) -> list[LoadRecord]:
        submitted = []
        while self._queue and len(self._open) < self._max_open and self._due <= (now := self._now()):
            request = self._queue.pop()
            # With detokenization, as in the server and the offline API.
            params = SamplingParams(temperature=0.0, max_tokens=request.n_out, ignore_eos=True)
            [request_id] = self._engine.submit(request.prompt_ids, params)
            record = LoadRecord(self._due if self._times else now, now, input_tokens=len(request.prompt_ids))
            self._open[request_id] = record
            submitted.append(record)
            self._due = next(self._times, float("inf")) if self._times else 0.0
        return submitted

    def _record(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case TokenProduced():
                    record = self._open[event.request_id]
                    record.times.append(event.time - self._start_time)
                    record.output_tokens += 1
                    self._num_pieces += 1
                case RequestAdmitted():
                    self._open[event.request_id].cached_tokens = event.cached_tokens
                case RequestFinished():
                    record = self._open.pop(event.request_id)
                    self._num_done += 1
                    record.end = event.time - self._start_time
                    if event.ending.reason.value not in ("stop", "length"):
                        record.error = f"{event.ending.reason.value} {event.ending.detail or ''}".strip()
                case _:
                    pass
