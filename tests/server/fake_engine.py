"""A stand-in for the engine process, which fails in the way that its model's name says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import zmq

from chairlift.core.request_limits import RequestLimits
from chairlift.server.process.messages import FailedToLoad, FromEngine, Heartbeat, Loaded, encode

settings = json.loads(sys.argv[-1])
illness, notes = settings["model"].split("@")
life = len(Path(notes).read_text().splitlines())  # 0 for the first process
with Path(notes).open("a") as file:
    file.write("born\n")

socket = zmq.Context().socket(zmq.PUSH)
socket.connect(settings["reports"])


def say(message: FromEngine) -> None:
    socket.send(encode(message))


if illness == "cannot load again" and life > 0:
    say(FailedToLoad("out of memory"))
    time.sleep(0.2)
    sys.exit(0)
say(Loaded(RequestLimits(vocab_size=320, max_model_len=256), max_batch_requests=8))
born = time.monotonic()
while True:
    time.sleep(0.05)
    age = time.monotonic() - born
    if illness == "silent" and life == 0:
        continue
    if illness == "babbles" and life == 0:
        socket.send(b"\xff not a message")
    hangs = illness == "hangs" and life == 0
    # The long steps of a healthy engine end at some point.
    say(Heartbeat(age if hangs else age % 0.4))
