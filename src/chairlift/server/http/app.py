"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

import chairlift
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.dashboard.routes import add_dashboard
from chairlift.server.http.bodies import invalid_value, threaded_body_route
from chairlift.server.http.errors import APIError, as_api_error, unavailable
from chairlift.server.http.guards import OutermostMiddleware, RequestGuard
from chairlift.server.http.host_names import HostNames
from chairlift.server.http.sse import unless_disconnected
from chairlift.server.openai.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from chairlift.server.process.engine_client import EngineState
from chairlift.server.responses.endpoint import respond
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.service import Service, check_token_ids
from chairlift.text.tools.tool_use import ToolUse

_ERROR = {"description": "An error in OpenAI's shape", "content": {"application/json": {}}}
# "default" also keeps FastAPI from promising its own answer to a bad body, which is never given here.
_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    ("default", 400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503), _ERROR
)


def make_app(
    service: Service,
    api_keys: Iterable[str] = (),
    cors_origins: Sequence[str] = (),
    *,
    dashboard: bool = True,
    hosts: HostNames | None = None,
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        pinging = asyncio.create_task(_ping(service))
        yield
        pinging.cancel()

    app = FastAPI(title="Chairlift", version=chairlift.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    hosts = hosts or HostNames()
    app.router.route_class = threaded_body_route(service.admission)
    app.add_middleware(
        RequestGuard, api_keys=list(api_keys), hosts=hosts, limits=service.limits, metrics=service.metrics
    )
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(OutermostMiddleware)
    _handle_errors(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_health(app, service)
    if dashboard:
        add_dashboard(app, service)
    return app


async def _ping(service: Service) -> None:
    while True:
        await asyncio.sleep(service.limits.ping_seconds)
        service.engine.nudge_streams()


def _handle_errors(app: FastAPI) -> None:
    async def shaped(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, APIError):
            return error.response()
        return APIError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()

    async def bad_body(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if http.method == "POST" and kind != "application/json":  # then FastAPI did not even try to read it
            problem = "send the body as JSON, with the header 'Content-Type: application/json'"
            return APIError(415, problem, code="unsupported_media_type").response()
        return _validation_error(error).response()

    app.add_exception_handler(ChairliftError, shaped)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_body)


def _validation_error(error: RequestValidationError) -> APIError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return APIError(400, "the body is not valid JSON", code="invalid_json")
    return invalid_value(first)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await service.complete(body, http)

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await service.chat(body, http)

    @app.post("/v1/responses", responses=_ERRORS)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        return await respond(service, body, http)

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return _model_card(service)


def _model_card(service: Service) -> dict[str, Any]:
    loaded = service.engine.loaded
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "max_model_len": loaded.max_model_len if loaded else None,
    }


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
        service.check_model(body.model)
        with service.admission.text_place():
            size = len(await http.body())
            tokens = await unless_disconnected(http, service.text.run(size, partial(_tokens_of, body, service)))
        loaded = service.engine.loaded
        return {"tokens": tokens, "count": len(tokens), "max_model_len": loaded.max_model_len if loaded else None}

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
        service.check_model(body.model)
        with service.admission.text_place():
            work = service.text.run(len(body.tokens), partial(_text_of, body, service))
            return {"prompt": await unless_disconnected(http, work)}


def _text_of(body: DetokenizeRequest, service: Service) -> str:
    return service.tokenizer.decode(check_token_ids("tokens", body.tokens))


def _tokens_of(body: TokenizeRequest, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("prompt", "give either prompt or messages")
    if body.prompt is not None:
        if body.tools is not None:
            raise InvalidParameter("tools", "only go with messages")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return service.tokenizer.encode(body.prompt, add_special_tokens=special)
    if body.add_special_tokens is not None:
        raise InvalidParameter("add_special_tokens", "only goes with prompt: a chat template writes its own")
    use = ToolUse.of(service.tool_format, body.tools, None, None)
    return use.encode(service.tokenizer, body.messages or [])


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Whether the service works: 503 while the engine is being started again."""
        if service.engine.state is not EngineState.READY:
            return unavailable(f"the engine is {service.engine.state.value}").response()
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Response:
        """Whether new requests are taken: as /health, and not while shutting down."""
        if service.admission.draining:
            return unavailable("the server is shutting down").response()
        return await health()

    @app.get("/metrics", responses=_ERRORS)
    async def metrics() -> Response:
        service.metrics.open.set(service.engine.num_open)
        service.metrics.engine_up.set(service.engine.state is EngineState.READY)
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=_ERRORS)
    async def version() -> dict[str, str]:
        return {"version": chairlift.__version__}
