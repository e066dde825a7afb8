"""The cases of `bench shapes` on our own engine, in a process that gives all of the device's memory back at its end."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from closed_loop import ReplyWriter, main


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift.config import EngineConfig
    from chairlift.errors import ChairliftError, InvalidParameter
    from chairlift_lab.common.shape_run import Cases, run_shape

    imported = time.time() - job["started"]
    try:
        cases = Cases(*(job[name] for name in Cases._fields))._replace(config=EngineConfig(**job["config"]))
        done = run_shape(cases, lambda text: answer(note=text))
    except InvalidParameter as error:
        answer(parameter=error.parameter, problem=error.problem)
    except ChairliftError as error:
        answer(problem=str(error))
    else:
        answer(**asdict(done), start_seconds=imported + done.ready_seconds)


if __name__ == "__main__":
    main("chairlift", "chairlift", run)
