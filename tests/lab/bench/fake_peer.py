"""A stub of a peer's Python: takes a program, the name of a peer and an argument, and behaves as FAKE_PEER says."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    behaviour = os.environ.get("FAKE_PEER", "works")
    if sys.argv[3:] == ["--check"]:
        say(**({"missing": "some_package"} if behaviour == "is missing" else {"version": "1.2.3"}))
        return
    job = json.loads(Path(sys.argv[3]).read_text())
    if behaviour == "crashes":
        print("Traceback\n\nMemoryError: no room for the cache", file=sys.stderr)
        sys.exit(3)
    if behaviour == "hangs":
        if os.fork() == 0:  # its child keeps the output open
            time.sleep(60)
        time.sleep(60)
    if behaviour == "chatters":
        print("Loading weights")
    answer = one_second_each(job)
    if behaviour == "is short":
        answer["token_times"][-1].pop()
    say(tokens=0)
    say(tokens=1)
    say(**answer)


def one_second_each(job: dict[str, Any]) -> dict[str, Any]:
    """One token per second, one request after the other: two requests of two tokens take four seconds."""
    token_times, now = [], 0.0
    for request in job["requests"]:
        token_times.append([now + place + 1.0 for place in range(request["n_out"])])
        now += request["n_out"]
    return {"seconds": now, "arrivals": [times[0] - 1.0 for times in token_times], "token_times": token_times}


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
