"""A server with the stub engine; prints its address once it is ready."""

from __future__ import annotations

import asyncio
import json
import sys

from chairlift.server.config import ServerConfig
from chairlift.server.lifecycle import serve_forever
from chairlift.server.wire.limits import Limits


def main() -> None:
    model, workers, tokens_per_s = json.loads(sys.argv[1])
    config = ServerConfig(
        model,
        ["stub"],
        engine={"tokens_per_s": tokens_per_s},
        port=0,
        limits=Limits(max_waiting=100_000),
        api_workers=workers,
        engine_module="chairlift_lab.bench.front_end.stub_engine",
        quiet=True,
    )
    sys.exit(asyncio.run(serve_forever(config, lambda name, address: print(address, flush=True))))


if __name__ == "__main__":
    main()
