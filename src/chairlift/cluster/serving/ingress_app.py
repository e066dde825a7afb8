"""The HTTP application of an ingress: the server's own guards, then the relay."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

import chairlift
from chairlift.cluster.monitoring.dashboard import dashboard_routes
from chairlift.cluster.monitoring.metrics import fleet_exposition
from chairlift.cluster.serving.fleet import FleetView
from chairlift.cluster.serving.relay import Relay
from chairlift.server.access.keys import KeyTable
from chairlift.server.access.rate_limits import RateLimiter
from chairlift.server.anthropic.errors import AnthropicErrors
from chairlift.server.config import ServerConfig
from chairlift.server.endpoint_paths import EndpointPaths
from chairlift.server.http.access_log import AccessLog, open_access_log
from chairlift.server.http.app import EXPOSED_HEADERS
from chairlift.server.http.errors import APIError, as_api_error, unavailable
from chairlift.server.http.guards import OutermostMiddleware, RequestGuard, check_sees_all
from chairlift.server.http.host_names import HostNames
from chairlift.server.http.rate_limits import RateLimitGuard
from chairlift.server.metrics import Metrics

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH")


def make_ingress_app(
    config: ServerConfig, fleet: FleetView, relay: Relay, metrics: Metrics, keys: KeyTable
) -> Starlette:
    """The routes of the ingress itself; everything else is relayed."""

    async def health(_: Request) -> Response:
        if not fleet.is_ready:
            raise unavailable("no replica is ready")
        return JSONResponse({"status": "ok"})

    async def replicas(http: Request) -> Response:
        check_sees_all(http.state)
        return JSONResponse({"version": chairlift.__version__, "router": fleet.router, "replicas": fleet.describe()})

    async def metrics_page(http: Request) -> Response:
        check_sees_all(http.state)
        return Response(await fleet_exposition(fleet, metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def files(_: Request) -> Response:
        """Refuses uploads before their body is read."""
        raise APIError(404, "a fleet keeps no files, and has no batches of files", code="files_disabled")

    async def on_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    middleware = [Middleware(EndpointPaths)]
    if config.access_log is not None:
        middleware.append(Middleware(AccessLog, log=open_access_log(config.access_log)))
    middleware += [Middleware(AnthropicErrors), Middleware(OutermostMiddleware)]
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
        ),
        Middleware(RateLimitGuard, limits=RateLimiter(metrics)),
    ]
    routes: Sequence[Route | Mount] = [
        Route("/health", health),
        Route("/ready", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/cluster/replicas", replicas),
        Route("/metrics", metrics_page),
        *(Route(path, files, methods=METHODS) for path in ("/v1/files", "/v1/batches")),
        *(Route(path, files, methods=METHODS) for path in ("/v1/files/{_:path}", "/v1/batches/{_:path}")),
        *(dashboard_routes(fleet, config.model_name) if config.dashboard else ()),
        Mount("/", relay),
    ]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={APIError: on_error})
    app.router.redirect_slashes = False
    return app
