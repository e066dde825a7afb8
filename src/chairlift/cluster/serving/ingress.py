"""The ingress of a fleet: an actor of Ray Serve that serves HTTP on a port of its own and relays to replicas.

Clients do not pass Ray's HTTP proxy, which copies every piece of a stream between processes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

import chairlift
from chairlift.cluster.monitoring import dashboard_routes, fleet_exposition
from chairlift.cluster.serving.relay import METHODS, Relay
from chairlift.cluster.serving.routing_table import REPLICAS, RoutingTable, routing_table
from chairlift.machine.files import raise_file_limit
from chairlift.server.access import KeyTable, RateLimiter, warn_of_short_keys
from chairlift.server.application import EXPOSED_HEADERS
from chairlift.server.config import ServerConfig, decode_config
from chairlift.server.front_end import request_log
from chairlift.server.http.boundary import AccessLog, Observer, RequestBoundary, open_access_log
from chairlift.server.http.guards import HostNames, RequestGuard, check_sees_all
from chairlift.server.http.listener import UvicornServer, listen, listening_address
from chairlift.server.http.pages import front_page
from chairlift.server.metrics import Metrics
from chairlift.server.process.this_process import freeze_loaded_objects
from chairlift.server.wire.errors import APIError, as_api_error, unavailable

FILE_PATHS = ("/v1/files", "/v1/batches", "/v1/messages/batches")


def make_ingress_app(
    config: ServerConfig, fleet: RoutingTable, relay: Relay, metrics: Metrics, keys: KeyTable
) -> Starlette:
    """The routes of the ingress itself; everything else is relayed."""

    async def health(_: Request) -> Response:
        if not fleet.is_ready:
            raise unavailable("no replica is ready")
        return JSONResponse({"status": "ok"})

    async def replicas(http: Request) -> Response:
        check_sees_all(http.state)
        return JSONResponse({"version": chairlift.__version__, "router": fleet.policy, "replicas": fleet.describe()})

    async def metrics_page(http: Request) -> Response:
        check_sees_all(http.state)
        return Response(await fleet_exposition(fleet, metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def front(http: Request) -> Response:
        return front_page(http, config.model_name, completes=False, dashboard=config.dashboard, fleet=True)

    async def files(_: Request) -> Response:
        """Refuses uploads before their body is read."""
        raise APIError(404, "a fleet keeps no files, and has no batches of files", code="files_disabled")

    async def stored(_: Request) -> Response:
        problem = "a fleet keeps no responses and no conversations; send all earlier items in input"
        raise APIError(404, problem, code="responses_disabled")

    async def on_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    log_lines = request_log(config)
    observers: list[Observer] = [] if log_lines is None else [log_lines]
    if config.access_log is not None:
        observers.append(AccessLog(open_access_log(config.access_log), config.access_log_salt))
    middleware = [Middleware(RequestBoundary, observers=observers)]
    if config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    middleware += [
        Middleware(
            RequestGuard,
            keys=keys,
            hosts=HostNames(config.host, config.allowed_hosts, config.cors_origins),
            limits=config.limits,
            metrics=metrics,
            public_metrics=config.public_metrics,
            isolate_keys=config.isolate_keys,
            rate_limits=RateLimiter(metrics),
        ),
    ]
    routes: Sequence[Route | Mount] = [
        Route("/", front),
        Route("/health", health),
        Route("/ready", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/cluster/replicas", replicas),
        Route("/metrics", metrics_page),
        *(Route(path, files, methods=METHODS) for path in FILE_PATHS),
        *(Route(f"{path}/{{_:path}}", files, methods=METHODS) for path in FILE_PATHS),
        Route("/v1/responses/{_}", stored, methods=["GET", "DELETE"]),
        *(Route(f"/v1/responses/{{_}}/{name}", stored, methods=METHODS) for name in ("cancel", "input_items")),
        *(Route(path, stored, methods=METHODS) for path in ("/v1/conversations", "/v1/conversations/{_:path}")),
        *(dashboard_routes(fleet, config.model_name) if config.dashboard else ()),
        Mount("/", relay),
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={APIError: on_error})
    app.router.redirect_slashes = False
    return app


log = logging.getLogger("chairlift.cluster")

REPLICA_SECONDS = 60.0  # A request waits so long while there is no replica.
POLL_SECONDS = 0.05


class Ingress:
    """Serves HTTP in a thread of its own; Ray Serve calls the methods from another one."""

    def __init__(self, replicas: Any, config: bytes, router: str, version: str, *, shared: bool) -> None:
        """`replicas` is the handle of the replicas' deployment, or the name of their application; `shared` says whether
        there are other ingresses, which listen on the same port."""
        if isinstance(replicas, str):
            from ray import serve

            replicas = serve.get_deployment_handle(REPLICAS, replicas)
        self._version, self._shared = version, shared
        self._config = decode_config(config)
        self._replicas = replicas.options()  # connects the handle, so that Ray Serve sends the replicas
        self._table = routing_table(router)
        if shared:
            self._table.share_replicas()
        self._relay = Relay(self._table, self._wait_for_replica, isolate_keys=self._config.isolate_keys)
        self._server: UvicornServer | None = None
        self._listening: Future[str] = Future()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingress", daemon=True)
        self._thread.start()
        self._address = self._listening.result()
        log.info("the ingress listens at %s", self._address)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._listening.done():
                self._listening.set_exception(error)
            raise

    async def _serve(self) -> None:
        config = self._config
        raise_file_limit()
        listener = listen(config.host, config.port, shared=self._shared)
        metrics, keys = Metrics(config.model_name), KeyTable(config.keys.read())
        warn_of_short_keys(keys)
        app = make_ingress_app(config, self._table, self._relay, metrics, keys)
        # A relayed request has a connection to its replica, too.
        self._server = UvicornServer(app, config.limits, config.certificate, files_per_connection=2)
        freeze_loaded_objects()  # Otherwise one body with many values would stop all streams for a second.
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            serving.result()  # raises what kept it from starting
        self._listening.set_result(listening_address(listener, config.host, secure=config.certificate is not None))
        stopping = asyncio.create_task(self._until_stopped())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain(self._server)
        await serving
        await self._relay.close()

    async def _until_stopped(self) -> None:
        while not self._stopping.is_set():
            await asyncio.sleep(POLL_SECONDS)

    async def _drain(self, server: UvicornServer) -> None:
        """Accept no more connections or requests, and wait for the requests in flight."""
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()  # The response in flight ends first: its client would send more requests.
        deadline = asyncio.get_running_loop().time() + self._config.drain_timeout
        while self._relay.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        server.should_exit = True

    async def _wait_for_replica(self) -> None:
        """Wait until there is a replica. The call waits in Ray Serve's queue, which starts one if there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLICA_SECONDS), self._replicas.choose_replica():
                while not self._table.replicas():  # its address may follow
                    await asyncio.sleep(POLL_SECONDS)

    # ---- called by Ray Serve -----------------------------------------------------------------------

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server of this ingress stopped")

    def status(self) -> dict[str, Any]:
        return {
            "address": self._address,
            "version": self._version,
            "pid": os.getpid(),
            "router": self._table.policy,
            "replicas": self._table.describe(),
        }

    def __del__(self) -> None:
        """Let the requests in flight finish."""
        if hasattr(self, "_stopping"):
            self._stopping.set()
            self._thread.join(self._config.drain_timeout + 10)
