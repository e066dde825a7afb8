"""The replica of a fleet: an actor of Ray Serve that runs a whole server in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from typing import Any

from chairlift.cluster.serving.routing_table import LoadReader, ReplicaInfo, ReplicaLoad, config_version, metric_sums
from chairlift.errors import ChairliftError
from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig, decode_config, encode_config

log = logging.getLogger("chairlift.cluster")

SERVER_MODULE = "chairlift.cluster.serving.replica"
STATS_TIMEOUT = 5.0  # seconds for the metrics of the own server
UNREACHABLE_SECONDS = 60.0  # A server that does not answer this long is replaced.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # A proxy of the environment is not used.


class ReplicaActor:
    """Starts `chairlift serve` on a free port and reports its address, health and load to Ray Serve."""

    def __init__(self, config: bytes) -> None:
        import ray

        self._config = decode_config(config)
        key = secrets.token_urlsafe(24)
        host = ray.util.get_node_ip_address()
        own = replace(self._config, host=host, port=0, keys=KeySources(proxy=key))
        self._server = _start(own)
        address = self._wait_until_listening()
        block_size = int(self._config.engine.get("block_size", 16))
        self._loads = LoadReader(block_size)
        self._address, self._key = address, key
        blocks = metric_sums(self._metrics()).get("chairlift_kv_blocks_total", 0)
        self._info = ReplicaInfo(
            address,
            key,
            num_tokens=max(1, int(blocks)) * block_size,
            version=config_version(config),
            pid=self._server.pid,
            node=ray.get_runtime_context().get_node_id(),
        )
        self._last_answer, self._last_load = time.monotonic(), ReplicaLoad()
        log.info("the server of this replica listens at %s", address)

    def _wait_until_listening(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        report = json.loads(line) if line else {"problem": "the server of this replica exited while it was starting"}
        if "address" not in report:
            self._server.wait()
            raise RuntimeError(report["problem"])
        return str(report["address"])

    def _metrics(self) -> str:
        request = urllib.request.Request(f"{self._address}/metrics", headers={"x-api-key": self._key})
        with _open(request, timeout=STATS_TIMEOUT) as response:
            return str(response.read().decode())

    def _load(self) -> ReplicaLoad:
        try:
            self._last_load = self._loads.read(self._metrics())
        except OSError as error:
            log.warning("the server of this replica does not answer: %s", error)
            return ReplicaLoad(is_ready=False)
        self._last_answer = time.monotonic()
        return self._last_load

    # ---- called by Ray Serve -----------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        return asdict(self._info)

    def record_routing_stats(self) -> dict[str, Any]:
        return asdict(self._load())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `FleetScaling` reads; the load was read for the routing stats a second ago at most."""
        load = self._last_load
        return {
            "wait": load.wait,
            "used": load.held_tokens / self._info.num_tokens,
            "tpot": load.tpot,
            "open": load.running + load.waiting,
        }

    def check_health(self) -> None:
        status = self._server.poll()
        if status is not None:
            raise RuntimeError(f"the server of this replica exited with status {status}")
        silence = time.monotonic() - self._last_answer
        if silence > UNREACHABLE_SECONDS:
            raise RuntimeError(f"the server of this replica has not answered for {silence:.0f} s")

    def __del__(self) -> None:
        """Let the requests in flight finish. Ray Serve has told the ingresses before that this replica stops."""
        server = getattr(self, "_server", None)
        if server is None or server.poll() is not None:
            return
        server.terminate()
        try:
            server.wait(self._config.drain_timeout + 10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _start(config: ServerConfig) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", SERVER_MODULE, str(os.getpid())]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    with server.stdin as pipe:
        pipe.write(encode_config(config))
    return server


def main() -> None:
    """The server of a replica: read its configuration from standard input and report its address on standard output."""
    import asyncio

    from chairlift.server.lifecycle import ServerEvents, serve_forever
    from chairlift.server.process.this_process import die_with_parent

    die_with_parent(int(sys.argv[1]))
    config = decode_config(sys.stdin.buffer.read())
    reports, out = os.fdopen(os.dup(1), "w"), sys.stderr.fileno()
    os.dup2(out, 1)  # only reports go to the pipe
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(config.log_level.upper())

    def report(**fields: str) -> None:
        print(json.dumps(fields), file=reports, flush=True)

    class Reports(ServerEvents):
        def ready(self, address: str, loaded: object) -> None:
            report(address=address)

    try:
        status = asyncio.run(serve_forever(config, Reports()))
    except ChairliftError as error:
        report(problem=str(error))
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
