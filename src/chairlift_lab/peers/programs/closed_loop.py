"""Shared by the programs in this folder. They run under a peer's own Python, so only the standard library is used.

A program is called with `--check` (print the installed version) or with the path of a job in JSON, and writes lines of
JSON to its standard output. What the peer itself prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

PROGRESS_SECONDS = 0.25

SubmitRequest = Callable[[str, Sequence[int], int], None]
"""Hand a request to the peer: its id, the prompt, and how many tokens to generate."""

Poll = Callable[[], Iterable[tuple[str, Sequence[float]]]]
"""Wait a little for tokens: which request, and at what time (`time.perf_counter`) each of its new tokens was there."""


def main(package: str, distribution: str, run: Callable[[dict[str, Any], ReplyWriter], None]) -> None:
    """`run` gets the job, and what to call with its answers."""
    answer = ReplyWriter()
    if sys.argv[1:] == ["--check"]:
        is_installed = find_spec(package) is not None
        answer(**({"version": version(distribution)} if is_installed else {"missing": package}))
        return
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    run(job, answer)


class ReplyWriter:
    """Writes lines of JSON to the original standard output, and redirects other output to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries write to descriptor 1 directly

    def __call__(self, **content: Any) -> None:
        self._lines.write(json.dumps(content) + "\n")
        self._lines.flush()


def run_job(job: dict[str, Any], answer: ReplyWriter, submit: SubmitRequest, poll: Poll) -> None:
    """The warm-up, then the requests that count."""
    _drive("warm-up", job["warm_up"], job["concurrency"], submit, poll)
    answer(tokens=0)
    answer(**_drive("timed", job["requests"], job["concurrency"], submit, poll, answer))


def _drive(
    label: str,
    requests: Sequence[Any],
    concurrency: int,
    submit: SubmitRequest,
    poll: Poll,
    answer: ReplyWriter | None = None,
) -> dict[str, Any]:
    """Keep `concurrency` requests in flight: the next is sent when one has finished."""
    names = {f"{label}-{index}": index for index in range(len(requests))}
    start_time = reported = time.perf_counter()
    arrivals: list[float] = []
    token_times: list[list[float]] = [[] for _ in requests]
    finished = tokens = 0
    while finished < len(requests):
        while len(arrivals) < len(requests) and len(arrivals) - finished < concurrency:
            index = len(arrivals)
            arrivals.append(time.perf_counter() - start_time)
            submit(f"{label}-{index}", requests[index]["prompt_ids"], requests[index]["n_out"])
        for name, moments in poll():
            times, wanted = token_times[names[name]], requests[names[name]]["n_out"]
            times += [moment - start_time for moment in moments]
            tokens += len(moments)
            finished += bool(moments) and len(times) == wanted
            if len(times) > wanted:
                raise RuntimeError(f"request {name}: {len(times)} tokens instead of {wanted}")
        if answer is not None and time.perf_counter() - reported > PROGRESS_SECONDS:
            reported = time.perf_counter()
            answer(tokens=tokens)
    return {"seconds": time.perf_counter() - start_time, "arrivals": arrivals, "token_times": token_times}
