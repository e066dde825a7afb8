"""The ASGI application of the HTTP front end: its middleware, error handlers and routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import chairlift
from chairlift.server.access import KeyTable
from chairlift.server.batch.folder import FilesFolder
from chairlift.server.batch.messages import add_message_batch_routes
from chairlift.server.batch.routes import add_file_routes
from chairlift.server.batch.runner import BatchRunner
from chairlift.server.http.adapters import add_adapter_routes
from chairlift.server.http.bodies import threaded_body_route
from chairlift.server.http.boundary import AccessLog, Observer, RequestBoundary, Tracing, open_access_log
from chairlift.server.http.dashboard import add_dashboard_routes
from chairlift.server.http.errors import add_error_handlers
from chairlift.server.http.guards import HostNames, RequestGuard, RequestMeter
from chairlift.server.http.llamacpp import add_llamacpp_routes
from chairlift.server.http.ollama import add_ollama_routes
from chairlift.server.http.pages import add_pages
from chairlift.server.http.request_log import RequestLog
from chairlift.server.http.routes import ERRORS, Service, add_generation_routes, add_status_routes, add_tokenizer_routes
from chairlift.server.stored.background import BackgroundResponses
from chairlift.server.stored.routes import StoredResponses, add_response_routes, add_stored_routes
from chairlift.server.stored.store import ResponseStore
from chairlift.server.wire.unknown_fields import HEADER, UnknownFieldsRule

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_RATE_LIMIT_HEADERS = [
    f"x-ratelimit-{figure}-{kind}" for figure in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
]
# That scripts of other origins may read.
EXPOSED_HEADERS = ["x-request-id", "request-id", "retry-after", HEADER, *_RATE_LIMIT_HEADERS]


def make_app(
    service: Service,
    keys: KeyTable | None = None,
    cors_origins: Sequence[str] = (),
    *,
    dashboard: bool = True,
    hosts: HostNames | None = None,
    public_metrics: bool = False,
    access_log: Path | None = None,
    access_log_salt: str = "",
    request_log: RequestLog | None = None,
    tracer_provider: TracerProvider | None = None,
    files: FilesFolder | None = None,
    responses: ResponseStore | None = None,
    unknown_fields: UnknownFieldsRule = "ignore",
) -> FastAPI:
    table = KeyTable() if keys is None else keys
    stored = None if responses is None else StoredResponses(responses)
    internal = make_internal_app(service, unknown_fields, stored)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        tasks = [asyncio.create_task(_ping(service))]
        if files is not None:
            tasks.append(asyncio.create_task(BatchRunner(files, service, internal, table).run()))
        if stored is not None:
            stored.background = BackgroundResponses(stored.store, internal, table)
            tasks.append(asyncio.create_task(stored.background.tend()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if stored is not None:
            await asyncio.to_thread(stored.store.close)
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
    app.add_middleware(
        RequestGuard,
        keys=table,
        hosts=hosts or HostNames(origins=cors_origins),
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
    observers: list[Observer] = [] if request_log is None else [request_log]
    if access_log is not None:
        observers.append(AccessLog(open_access_log(access_log), access_log_salt))
    if tracer_provider is not None:
        observers.append(Tracing(tracer_provider, service.model.name))
    app.add_middleware(RequestBoundary, observers=observers)
    _add_generation(app, service, stored)
    add_stored_routes(app, stored)
    app.state.stored = stored
    add_tokenizer_routes(app, service)
    add_ollama_routes(app, service)
    add_llamacpp_routes(app, service)
    add_status_routes(app, service)
    add_adapter_routes(app, service)
    add_file_routes(app, files, ERRORS)
    add_message_batch_routes(app, files, ERRORS)
    if dashboard:
        add_dashboard_routes(app, service.subscribers, policy_switch=service.policy_switch)
    completes = service.model.tokenizer.chat_template is None
    add_pages(app, service.model.name, completes=completes, dashboard=dashboard)
    add_error_handlers(app, dashboard=dashboard)
    return app


def make_internal_app(
    service: Service, unknown_fields: UnknownFieldsRule, stored: StoredResponses | None = None
) -> FastAPI:
    """The generation routes for requests of this process, whose clients were authenticated before. The limits of their
    keys apply."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestMeter, rate_limits=service.rate_limits, unknown_fields=unknown_fields)
    app.add_middleware(RequestBoundary)
    _add_generation(app, service, stored)
    add_error_handlers(app, dashboard=False)
    return app


def _add_generation(app: FastAPI, service: Service, stored: StoredResponses | None) -> None:
    """Add the generation routes, and what reads the bodies of all routes."""
    app.router.route_class = threaded_body_route(service.admission, service.limits.tenant_weights)
    add_generation_routes(app, service)
    add_response_routes(app, service, stored)


async def _ping(service: Service) -> None:
    while True:
        await asyncio.sleep(service.limits.ping_seconds)
        service.engine.ping_streams()
