"""An engine process without a model: every step adds one token to every request, at a given rate.

`python -m chairlift_lab.common.stub_engine serve MODEL WORKERS RATE` starts a server with it and prints its address.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from typing import Any

import zmq

from chairlift.core.request import RequestLimits
from chairlift.server.config import ServerConfig
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import (
    Cancel,
    FromEngine,
    Heartbeat,
    Loaded,
    Shutdown,
    StepReport,
    Submit,
    Update,
    decode_to_engine,
    encode,
)

TEXT, TOKEN = " token", 5
HEARTBEAT_SECONDS = 0.5
LIMITS = RequestLimits(vocab_size=32_000, max_model_len=1_000_000)


class StubEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._tokens_per_s: float = settings["engine"]["tokens_per_s"]
        self._parent = settings["parent"]
        context = zmq.Context()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for channel in (self._inbox, self._outbox):
            channel.setsockopt(zmq.SNDHWM, 0)
            channel.setsockopt(zmq.RCVHWM, 0)
        self._inbox.connect(settings["commands"])
        self._outbox.connect(settings["reports"])
        self._left: dict[str, int] = {}  # tokens to come, by request
        self._stopping = False

    def run(self) -> None:
        self._send(Loaded(LIMITS, max_batch_requests=100_000))
        due = beat = time.monotonic()
        while not self._stopping and os.getppid() == self._parent:
            now = time.monotonic()
            if now >= beat:
                self._send(Heartbeat(0.0))
                beat = now + HEARTBEAT_SECONDS
            if not self._left:
                due = now  # idle time earns no tokens
            self._receive(1000 * (min(due, beat) - now) if self._left else 100.0)
            now = time.monotonic()
            if self._left and now >= due:
                due = max(due + len(self._left) / self._tokens_per_s, now - 1.0)  # catches up with short delays
                self._step()

    def _receive(self, wait_ms: float) -> None:
        if not self._inbox.poll(max(0, math.floor(wait_ms))):
            return
        while self._inbox.poll(0):
            match decode_to_engine(self._inbox.recv()):
                case Submit() as request:
                    self._left[request.request_id] = request.params.max_tokens or 1
                case Cancel(request_ids):
                    for request_id in request_ids:
                        self._left.pop(request_id, None)
                case Shutdown():
                    self._stopping = True

    def _step(self) -> None:
        updates = []
        for request_id, left in list(self._left.items()):
            update = Update(request_id, text=TEXT, tokens=[TOKEN])
            if left == 1:
                update.finish_reason = "length"
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
            updates.append(update)
        count = len(updates)
        self._send(StepReport(updates, count, waiting=0, used_blocks=0, total_blocks=1, preemptions=0, requests=count))

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))


def stub_config(model: str, tokens_per_s: float, **options: Any) -> ServerConfig:
    """A server whose engine generates so many tokens per second; `model` has the tokenizer."""
    return ServerConfig(
        model,
        ["stub"],
        engine={"tokens_per_s": tokens_per_s},
        port=0,
        limits=Limits(max_waiting=100_000),
        engine_module="chairlift_lab.common.stub_engine",
        quiet=True,
        **options,
    )


def _serve(model: str, workers: str, tokens_per_s: str) -> int:
    from chairlift.server.lifecycle import serve_forever

    config = stub_config(model, float(tokens_per_s), api_workers=int(workers))
    return asyncio.run(serve_forever(config, lambda name, address: print(address, flush=True)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(_serve(*sys.argv[2:]))
    StubEngine(json.loads(sys.argv[-1])).run()
