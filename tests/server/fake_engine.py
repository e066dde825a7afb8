"""A fake engine process that fails as its model name specifies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import zmq

from chairlift.core.request import RequestLimits
from chairlift.server.wire.messages import (
    FailedToLoad,
    FromEngine,
    Heartbeat,
    Loaded,
    StepReport,
    Submit,
    Update,
    decode_to_engine,
    encode,
)

settings = json.loads(sys.stdin.readline() if "-" in sys.argv else sys.argv[-1])
fault, notes = settings["model"].split("@")
num_starts = len(Path(notes).read_text().splitlines())  # 0 for the first process
with Path(notes).open("a") as file:
    file.write("born\n")

socket = zmq.Context().socket(zmq.PUSH)
socket.connect(settings["reports"])


def send(message: FromEngine) -> None:
    socket.send(encode(message))


if fault == "out of memory":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "exits":
    sys.exit(3)
if fault == "cannot load again" and num_starts > 0:
    send(FailedToLoad("out of memory"))
    time.sleep(0.2)
    sys.exit(0)
send(Loaded(RequestLimits(vocab_size=320, max_model_len=256), max_batch_requests=8))
if fault == "dies of requests":
    commands = zmq.Context().socket(zmq.PULL)
    commands.connect(settings["commands"])
    while (request := decode_to_engine(commands.recv())) and isinstance(request, Submit):
        if request.prompt == [666]:
            sys.exit(1)
        done = Update(request.request_id, tokens=[1], finish_reason="length")
        send(StepReport([done], running=0, waiting=0, used_blocks=0, total_blocks=9, preemptions=0))
born = time.monotonic()
while True:
    time.sleep(0.05)
    age = time.monotonic() - born
    if fault == "silent" and num_starts == 0:
        continue
    if fault == "babbles" and num_starts == 0:
        socket.send(b"\xff not a message")
    hangs = fault == "hangs" and num_starts == 0
    # Long steps of a healthy engine end eventually.
    send(Heartbeat(age if hangs else age % 0.4))
