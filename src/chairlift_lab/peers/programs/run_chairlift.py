"""Our own engine in a process that gives all memory back at its end: the cases of `bench shapes`, or a load."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from closed_loop import ReplyWriter, main


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift.errors import ChairliftError, InvalidParameter

    try:
        (run_shapes if "shape" in job else run_load)(job, answer)
    except InvalidParameter as error:
        answer(parameter=error.parameter, problem=error.problem)
    except ChairliftError as error:
        answer(problem=str(error))


def run_shapes(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift.config import EngineConfig
    from chairlift_lab.common.shape_run import Cases, run_shape

    imported = time.time() - job["started"]
    cases = Cases(*(job[name] for name in Cases._fields))._replace(config=EngineConfig(**job["config"]))
    done = run_shape(cases, lambda text: answer(note=text))
    answer(**asdict(done), start_seconds=imported + done.ready_seconds)


def run_load(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift_lab.load.offline import run_in_this_process

    answer(**asdict(run_in_this_process(job, lambda *progress: answer(progress=progress))))


if __name__ == "__main__":
    main("chairlift", "chairlift", run)
