"""The load of `bench serve --compare-offline` on our own engine without a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from closed_loop import ReplyWriter, main


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift.errors import ChairliftError
    from chairlift_lab.load.offline import run_in_this_process

    try:
        load = run_in_this_process(job, lambda *progress: answer(progress=progress))
    except ChairliftError as error:
        answer(error=str(error))
    else:
        answer(**asdict(load))


if __name__ == "__main__":
    main("chairlift", "chairlift", run)
