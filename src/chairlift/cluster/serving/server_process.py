"""The server of a replica: reads its configuration from standard input and reports its address on standard output."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

from chairlift.errors import ChairliftError
from chairlift.server.config import decode_config
from chairlift.server.lifecycle import serve_forever
from chairlift.server.process.this_process import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    config = decode_config(sys.stdin.buffer.read())
    reports, out = os.fdopen(os.dup(1), "w"), sys.stderr.fileno()
    os.dup2(out, 1)  # only reports go to the pipe
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(config.log_level.upper())

    def report(**fields: str) -> None:
        print(json.dumps(fields), file=reports, flush=True)

    try:
        status = asyncio.run(serve_forever(config, lambda model, address: report(address=address)))
    except ChairliftError as error:
        report(problem=str(error))
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
