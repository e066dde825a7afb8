"""The engine process: receives requests from a socket, runs steps and reports their results.

The front end starts it as `python -m chairlift.server.process.engine_process - PID`, with the process id of its parent
(`this_process.py`). It imports torch and reads its settings from its standard input, as JSON. It exits on a Shutdown
message or when its parent process has exited.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import zmq

from chairlift.core.adapters import Adapter, AdapterPool
from chairlift.core.events import (
    BudgetDecided,
    DraftsVerified,
    Event,
    PromptPooled,
    PromptScored,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StepDone,
    TextProduced,
    TokenProduced,
)
from chairlift.core.images import PromptImage
from chairlift.core.policies.base import make_policy
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.machine.files import raise_file_limit
from chairlift.machine.hardware import create_context
from chairlift.server.dashboard.recorder import FramePublisher
from chairlift.server.process.this_process import (
    collection_paused,
    die_with_parent,
    exit_if_orphaned,
    freeze_loaded_objects,
)
from chairlift.server.wire.messages import (
    AdapterChanged,
    AdapterTotals,
    Cancel,
    FailedToLoad,
    FromEngine,
    Heartbeat,
    ImageInput,
    LoadAdapter,
    Loaded,
    Loading,
    RecordSteps,
    Refused,
    Shutdown,
    StepReport,
    Submit,
    SwitchPolicy,
    UnloadAdapter,
    Update,
    decode_to_engine,
    encode,
)

if TYPE_CHECKING:
    from chairlift.progress import StartStage

IDLE_POLL_MS = 200
QUIET_MS = 10  # Something is prepared for later steps after this long without a message.
HEARTBEAT_SECONDS = 0.5
STAGE_SECONDS = 0.1  # Reports about a stage of loading are this far apart.


class EngineProcess:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.parent: int = settings["parent"]  # os.getppid() would be wrong if the parent has exited already.
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        for socket in (self.inbox, self.outbox):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.inbox.connect(settings["commands"])
        self.outbox.connect(settings["reports"])
        self.stopping = False
        self._adapter_files = ThreadPoolExecutor(1, thread_name_prefix="chairlift-adapter-files")
        self._read_adapters: SimpleQueue[tuple[LoadAdapter, Adapter | Exception]] = SimpleQueue()
        self.last_stage = float("-inf")  # when the front end was told about loading
        self.turn_began: float | None = None  # start of the current iteration of the main loop; None while loading

    def main(self) -> int:
        """Load the engine and serve until stopped. The exit status is 1 only after a failed step."""
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        try:
            self._load()
        except Exception as error:
            self._send(_failure(error))
            return 0
        freeze_loaded_objects()
        try:
            return self._serve()
        finally:
            self.engine.shut_down()

    def _serve(self) -> int:
        while not self.stopping:
            self._turn()
            if self.engine.fatal is not None:
                logging.getLogger("chairlift").error("a step failed", exc_info=self.engine.fatal)
                return 1
        return 0

    def _turn(self) -> None:
        """Receive messages, then run a step, which excludes requests cancelled before it."""
        self.turn_began = time.monotonic()
        # What is prepared in the pause between two requests of a client delays the second.
        is_quiet = math.isinf(self.engine.pause()) and not self.inbox.poll(QUIET_MS)
        prepared = is_quiet and self.engine.prepare()
        self._receive_messages(0 if prepared else min(1000 * self.engine.pause(), IDLE_POLL_MS))
        if self.engine.has_work:
            events = self.engine.step()
            for message in step_messages(events, self.engine.scheduler):
                self._send(message)
            self.frames.record(events)
        self._register_adapters()
        self.frames.publish_if_due()

    def _load(self) -> None:
        from chairlift.config import EngineConfig
        from chairlift.engine.settings import for_latency
        from chairlift.engine.startup import load_engine
        from chairlift.progress import StartTimeline, stages_told_to

        timeline = StartTimeline(self.settings.get("begun"))
        timeline.end("imports")
        config = for_latency(EngineConfig(**self.settings["engine"]))
        with stages_told_to(self._report_stage):
            started = load_engine(self.settings["model"], config, progress=False, timeline=timeline)
        self.engine = started.engine
        self.frames = FramePublisher(self.engine, self._send)
        scheduler = self.engine.scheduler
        timeline.end("engine")
        logging.getLogger("chairlift").debug(f"start      {timeline}")
        self._send(
            Loaded(
                self.engine.limits,
                scheduler.max_batch_requests,
                scheduler.kv.pool.num_blocks,
                timeline.seconds,
                described=started.described,
                endpoint=started.endpoint,
            )
        )

    def _report_stage(self, stage: StartStage) -> None:
        """Tell the front end how far a stage is, not too often. A socket belongs to the main thread."""
        now = time.monotonic()
        if threading.current_thread() is threading.main_thread() and now - self.last_stage > STAGE_SECONDS:
            self.last_stage = now
            self._send(Loading(*stage))

    def _send_heartbeats(self) -> None:
        """Send heartbeats from a thread with its own socket: sockets are not thread-safe."""
        socket = zmq.Context().socket(zmq.PUSH)  # a separate context, so that the exit does not wait for it
        socket.connect(self.settings["reports"])
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            exit_if_orphaned(self.parent)
            began = self.turn_began
            socket.send(encode(Heartbeat(0.0 if began is None else time.monotonic() - began)))

    def _receive_messages(self, wait_ms: float) -> None:
        if wait_ms > 0 and not self.inbox.poll(math.ceil(wait_ms)):
            return
        while True:
            try:
                data = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        match decode_to_engine(data):
            case Submit() as request:
                self._submit(request)
            case Cancel(request_ids):
                for request_id in request_ids:
                    self.engine.cancel(request_id)
            case RecordSteps() as lease:
                self.frames.extend_lease(lease)
            case SwitchPolicy(name, max_delay_ms):
                self.engine.switch_policy(make_policy(name, max_delay_ms))  # the front end has checked it
            case LoadAdapter() as change:
                self._adapter_files.submit(self._read_adapter, change)
            case UnloadAdapter() as change:
                self._send(self._unload_adapter(change))
            case Shutdown():
                self.stopping = True

    def _submit(self, request: Submit) -> None:
        try:
            self.engine.submit(
                request.prompt,
                request.params,
                request_id=request.request_id,
                timeout=request.timeout,
                cache_salt=request.cache_salt,
                priority=request.priority,
                tenant=request.tenant,
                targets=request.targets,
                service_class=request.service_class,
                images=[_prompt_image(image) for image in request.images],
                lora=request.lora,
            )
        except InvalidParameter as error:
            self._send(Refused(request.request_id, error.parameter, error.problem))

    def _read_adapter(self, change: LoadAdapter) -> None:
        """Look at the files of an adapter, in a thread; the main thread registers it."""
        try:
            if self.engine.adapters is None:
                raise InvalidParameter("lora", "the engine has no adapters; start it with --lora or --max-loras")
            self._read_adapters.put((change, self.engine.adapters.read(change.name, change.path)))
        except Exception as error:
            self._read_adapters.put((change, error))

    def _register_adapters(self) -> None:
        while not self._read_adapters.empty():
            change, adapter = self._read_adapters.get()
            try:
                if isinstance(adapter, Exception):
                    raise adapter
                assert self.engine.adapters is not None
                self.engine.adapters.register(adapter)
                self._send(AdapterChanged(change.request_id))
            except InvalidParameter as error:
                self._send(AdapterChanged(change.request_id, error.problem, error.parameter))
            except Exception as error:
                self._send(AdapterChanged(change.request_id, str(error)))

    def _unload_adapter(self, change: UnloadAdapter) -> AdapterChanged:
        known = self.engine.adapters is not None and self.engine.adapters.pool.unregister(change.name)
        return AdapterChanged(change.request_id, None if known else f"there is no adapter {change.name!r}", "lora_name")

    def _send(self, message: FromEngine) -> None:
        self.outbox.send(encode(message))


def _prompt_image(image: ImageInput) -> PromptImage:
    import numpy as np

    data = {name: np.frombuffer(raw, kind).reshape(shape) for name, (kind, shape, raw) in image.arrays.items()}
    return PromptImage(image.digest, tuple(image.spans), image.work, image.whole, data)


def _failure(error: Exception) -> FailedToLoad:
    """Describe why the engine cannot be loaded: a retry would fail again."""
    if isinstance(error, InvalidParameter):
        return FailedToLoad(error.problem, error.parameter)
    if isinstance(error, ChairliftError | OSError):
        return FailedToLoad(str(error))
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        way_out = "choose a smaller model, a smaller --kv-memory or a quantization"
        return FailedToLoad(f"there is not enough memory for the model and its KV cache; {way_out}")
    logging.getLogger("chairlift").error("the model cannot be loaded", exc_info=error)
    return FailedToLoad(f"{type(error).__name__}: {error}")


def _read_settings(parent: int) -> dict[str, Any]:
    """Read the settings from the standard input; what loading needs is imported meanwhile."""
    die_with_parent(parent)
    found: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: found.extend(map(_received, sys.stdin.buffer)), daemon=True)
    reader.start()
    _import_engine(found)
    reader.join()
    if not found:
        sys.exit(0)  # the command has ended without an engine
    return found[0]


def _import_engine(received: Sequence[dict[str, Any]]) -> None:
    """Import what loading needs. If the settings are there when torch is, a GPU's libraries start beside the rest."""
    with suppress(Exception), collection_paused():  # an error is reported when the model is loaded
        import torch  # noqa: F401  (takes long: the settings may arrive meanwhile)

        if received:
            _start_libraries(**{name: received[0]["engine"].get(name, "auto") for name in ("device", "dtype")})
        import chairlift.engine.startup  # noqa: F401


def _start_libraries(device: str, dtype: str) -> None:
    """Start a GPU's libraries as `load_engine` will, which then finds them started."""
    import torch

    from chairlift.kernels.gpu import start_libraries

    if device == "cpu" or not torch.cuda.is_available():
        return
    chosen = torch.device("cuda" if device == "auto" else device)
    start_libraries(chosen, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))


def _received(text: bytes) -> dict[str, Any]:
    """Decode the settings. A GPU's context is created in a thread meanwhile, which takes a part of a second."""
    settings: dict[str, Any] = json.loads(text)
    device = settings["engine"].get("device", "auto")
    threading.Thread(target=create_context, args=(device,), daemon=True).start()
    return settings


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the front end handles it
    raise_file_limit()
    settings = _read_settings(int(sys.argv[2]))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(settings["log_level"].upper())
    process = EngineProcess(settings)
    try:
        sys.exit(process.main())
    finally:
        process.context.destroy(linger=1000)  # Queued messages are sent first.


OUTPUT_EVENTS = (TokenProduced, TextProduced)  # the most frequent events
CLIENT_EVENTS = (*OUTPUT_EVENTS, PromptScored, PromptPooled, RequestAdmitted, RequestFinished)  # become updates


def step_messages(events: Sequence[Event], scheduler: Scheduler) -> list[Refused | StepReport]:
    """Return the messages about one step, in the order of sending: refusals of requests that failed because of a
    parameter or may be retried, and the report."""
    others = [event for event in events if not isinstance(event, OUTPUT_EVENTS)]
    endings = [(event.request_id, event.ending) for event in others if isinstance(event, RequestFinished)]
    refusals = [
        Refused(request_id, ending.parameter, str(ending.detail))
        for request_id, ending in endings
        if ending.parameter is not None or ending.temporary
    ]
    return [*refusals, _step_report(events, others, scheduler)]


def _step_report(events: Sequence[Event], others: Sequence[Event], scheduler: Scheduler) -> StepReport:
    """Build the report; `others` are the events except OUTPUT_EVENTS."""
    admitted = [event for event in others if isinstance(event, RequestAdmitted)]
    more: dict[str, Any] = {}
    for event in others:
        if isinstance(event, StepDone):
            timing = event.timing
            more |= {
                "decode_tokens": event.decode_tokens,
                "prefill_tokens": event.prefill_tokens,
                "requests": event.requests,
                "seconds": event.seconds,
                "part_seconds": {
                    "schedule": event.schedule_seconds,
                    "build": timing.build,
                    "forward": timing.forward,
                    "sample": timing.sample,
                    "apply": event.apply_seconds,
                },
                "predicted_seconds": event.predicted_seconds,
                "speedup": event.speedup,
                **_drafts(others),
            }
        elif isinstance(event, BudgetDecided):
            limits = event.limits
            more |= {"prefill_limit": limits.prefill_tokens, "limit_reason": limits.reason.name.lower()}
    return StepReport(
        updates=collect_updates(events),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        wait_reasons={reason.label: count for reason, count in scheduler.waiting.reasons().items()},
        lookups=dict(Counter(event.miss.name.lower() if event.miss else "all_found" for event in admitted)),
        used_blocks=scheduler.kv.pool.num_used,
        total_blocks=scheduler.kv.pool.num_blocks,
        states=None if scheduler.kv.states is None else scheduler.kv.states.usage,
        tiers=[] if scheduler.kv.tiers is None else scheduler.kv.tiers.usage,
        adapters=_adapter_totals(scheduler.adapters),
        preemptions=sum(isinstance(event, RequestPreempted) for event in others),
        **more,
    )


def _adapter_totals(pool: AdapterPool) -> AdapterTotals | None:
    if not pool.max_slots:
        return None
    in_memory = pool.in_memory
    tokens = {adapter.name: adapter.num_tokens for adapter in in_memory if adapter.num_tokens}
    return AdapterTotals(len(pool.names), len(in_memory), pool.num_bytes, pool.num_loads, pool.num_evictions, tokens)


def _drafts(events: Sequence[Event]) -> dict[str, Any]:
    verified = [event for event in events if isinstance(event, DraftsVerified)]
    if not verified:
        return {}
    positions = range(max(event.proposed for event in verified))
    return {
        "verifications": len(verified),
        "proposed_at": [sum(event.proposed > position for event in verified) for position in positions],
        "accepted_at": [sum(event.accepted > position for event in verified) for position in positions],
    }


def collect_updates(events: Sequence[Event]) -> list[Update]:
    """Group the events of one step by completion. Must be fast, since the engine waits for it."""
    updates: dict[str, Update] = {}
    for event in events:
        if not isinstance(event, CLIENT_EVENTS):
            continue
        update = updates.get(event.request_id)
        if update is None:
            update = updates[event.request_id] = Update(event.request_id)
        if isinstance(event, TokenProduced):
            update.tokens.append(event.token)
            if event.logprobs is not None:
                update.logprobs.append(event.logprobs)
        elif isinstance(event, TextProduced):
            update.text += event.text
        elif isinstance(event, RequestFinished):
            update.finish_reason, update.stop_reason = event.ending.reason.value, event.ending.detail
            update.score = event.score
        elif isinstance(event, PromptScored):
            update.prompt_logprobs += event.logprobs
        elif isinstance(event, PromptPooled):
            update.vector = array("f", event.vector).tobytes()
        elif update.cached_tokens is None:
            update.cached_tokens, update.admitted = event.cached_tokens, event.time
    return list(updates.values())


if __name__ == "__main__":
    main()
