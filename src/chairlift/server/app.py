"""The ASGI application: middleware, error handlers and routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

import chairlift
from chairlift.errors import ChairliftError
from chairlift.server.access import KeyTable
from chairlift.server.files.batch_runner import BatchRunner
from chairlift.server.files.folder import FilesFolder
from chairlift.server.files.routes import add_file_routes
from chairlift.server.generation.endpoint import invalid_field
from chairlift.server.http.bodies import threaded_body_route
from chairlift.server.http.boundary import AccessLog, RequestBoundary, Tracing, open_access_log
from chairlift.server.http.dashboard import add_dashboard_routes
from chairlift.server.http.guards import HostNames, RequestGuard, RequestMeter
from chairlift.server.http.routes import ERRORS, add_generation_routes, add_status_routes, add_tokenizer_routes
from chairlift.server.http.service import Service
from chairlift.server.wire.errors import APIError, as_api_error
from chairlift.server.wire.unknown_fields import HEADER, UnknownFieldsRule

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_RATE_LIMIT_HEADERS = [
    f"x-ratelimit-{figure}-{kind}" for figure in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
]
# That scripts of other origins may read.
EXPOSED_HEADERS = ["x-request-id", "request-id", "retry-after", HEADER, *_RATE_LIMIT_HEADERS]
# Codes of the errors that the web framework raises: a body nested too deeply, a path or method without a route.
_FRAMEWORK_CODES = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed"}


def make_app(
    service: Service,
    keys: KeyTable | None = None,
    cors_origins: Sequence[str] = (),
    *,
    dashboard: bool = True,
    hosts: HostNames | None = None,
    public_metrics: bool = False,
    access_log: Path | None = None,
    tracer_provider: TracerProvider | None = None,
    files: FilesFolder | None = None,
    unknown_fields: UnknownFieldsRule = "ignore",
) -> FastAPI:
    table = KeyTable() if keys is None else keys

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        tasks = [asyncio.create_task(_ping(service))]
        if files is not None:
            internal = make_internal_app(service, unknown_fields)
            tasks.append(asyncio.create_task(BatchRunner(files, service, internal, table).run()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tracer_provider is not None:
            await asyncio.to_thread(tracer_provider.shutdown)  # sends what it has not sent yet

    # A redirect for a trailing slash would name the address of this server, which clients of a proxy must not learn.
    app = FastAPI(
        title="Chairlift",
        version=chairlift.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    hosts = hosts or HostNames(origins=cors_origins)
    app.router.route_class = threaded_body_route(service.admission, service.limits.tenant_weights)
    app.add_middleware(
        RequestGuard,
        keys=table,
        hosts=hosts,
        limits=service.limits,
        metrics=service.metrics,
        public_metrics=public_metrics,
        isolate_keys=service.isolate_keys,
        uploads=files is not None,
        rate_limits=service.rate_limits,
        unknown_fields=unknown_fields,
    )
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    observers: list[AccessLog | Tracing] = []
    if access_log is not None:
        observers.append(AccessLog(open_access_log(access_log)))
    if tracer_provider is not None:
        observers.append(Tracing(tracer_provider, service.model.name))
    app.add_middleware(RequestBoundary, observers=observers)
    _add_error_handlers(app)
    add_generation_routes(app, service)
    add_tokenizer_routes(app, service)
    add_status_routes(app, service)
    add_file_routes(app, files, ERRORS)
    if dashboard:
        add_dashboard_routes(app, service)
    return app


def make_internal_app(service: Service, unknown_fields: UnknownFieldsRule) -> FastAPI:
    """The generation routes for requests of this process, whose clients were authenticated before. The limits of their
    keys apply."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.router.route_class = threaded_body_route(service.admission, service.limits.tenant_weights)
    app.add_middleware(RequestMeter, rate_limits=service.rate_limits, unknown_fields=unknown_fields)
    app.add_middleware(RequestBoundary)
    _add_error_handlers(app)
    add_generation_routes(app, service)
    return app


async def _ping(service: Service) -> None:
    while True:
        await asyncio.sleep(service.limits.ping_seconds)
        service.engine.ping_streams()


def _add_error_handlers(app: FastAPI) -> None:
    async def chairlift_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, APIError):
            return error.response()
        code = _FRAMEWORK_CODES.get(error.status_code)
        return APIError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {})).response()

    async def validation_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if http.method == "POST" and media_type != "application/json":  # FastAPI parses no other bodies
            problem = "send the body as JSON, with the header 'Content-Type: application/json'"
            return APIError(415, problem, code="unsupported_media_type").response()
        errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # The first part is "body".
        if errors[0]["type"] == "json_invalid":
            return APIError(400, "the body is not valid JSON", code="invalid_json").response()
        return as_api_error(invalid_field(errors, error.body)).response()

    app.add_exception_handler(ChairliftError, chairlift_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
