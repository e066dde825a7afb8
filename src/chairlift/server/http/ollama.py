"""The routes of Ollama's API."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

from chairlift.server.generation.handler import check_model_name
from chairlift.server.http.routes import ERRORS, Service
from chairlift.server.ollama import endpoint, models, types
from chairlift.server.process.engine_client import EngineState
from chairlift.server.wire.errors import APIError, unavailable

NDJSON = "application/x-ndjson"


def add_ollama_routes(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", responses=ERRORS)
    async def chat(body: types.OllamaChatRequest, http: Request) -> Response:
        """Answers a conversation, as Ollama's; a stream of lines of JSON unless `stream` is false."""
        if not body.messages:
            _check_loaded(service, body)
            return JSONResponse(endpoint.loaded_response(body.model or service.model.name, is_chat=True))
        return await service.handle(endpoint.OllamaChat(body, service.model, http.state), http)

    @app.post("/api/generate", responses=ERRORS)
    async def generate(body: types.GenerateRequest, http: Request) -> Response:
        """Completes a prompt that the chat template writes, as Ollama's."""
        if not (body.prompt or body.suffix or body.images):
            _check_loaded(service, body)
            return JSONResponse(endpoint.loaded_response(body.model or service.model.name, is_chat=False))
        return await service.handle(endpoint.Generate(body, service.model, http.state), http)

    @app.post("/api/embed", responses=ERRORS)
    async def embed(body: types.EmbedRequest, http: Request) -> Response:
        """Vectors of texts, as Ollama's."""
        return await _embed(body, http)

    @app.post("/api/embeddings", responses=ERRORS)
    async def old_embeddings(body: types.OldEmbeddingRequest, http: Request) -> Response:
        """The vector of a text, as Ollama had it before /api/embed."""
        return await _embed(body, http)

    async def _embed(body: types.EmbedRequest | types.OldEmbeddingRequest, http: Request) -> Response:
        if not (body.input if isinstance(body, types.EmbedRequest) else body.prompt):
            _check_loaded(service, body)
            return JSONResponse(endpoint.embeddings_response(body, [], 0, service.model.name, http.state.arrived))
        return await service.handle(endpoint.OllamaEmbedding(body, service.model, http.state), http)

    @app.get("/api/tags", responses=ERRORS)
    async def list_models() -> dict[str, Any]:
        """The names that requests may use, with a tag."""
        return models.tags(service.model)

    @app.get("/api/ps", responses=ERRORS)
    async def running_models() -> dict[str, Any]:
        """The model, once the engine is ready."""
        if service.engine.state is not EngineState.READY:
            return {"models": []}
        return models.running(service.model, service.max_model_len or 0)

    @app.get("/api/version", responses=ERRORS)
    async def api_version() -> dict[str, str]:
        """The version of Ollama whose API this is."""
        return {"version": models.API_VERSION}

    @app.post("/api/show", responses=ERRORS)
    async def show(body: types.NamedModel) -> dict[str, Any]:
        """What the model is and can do, as Ollama's."""
        check_model_name(service.model, body.given)
        return models.description(service.model, body.given, service.max_model_len)

    @app.post("/api/pull", responses=ERRORS)
    async def pull(body: types.NamedModel) -> Response:
        """Succeed for the served model: programs fetch the model that they are about to use."""
        check_model_name(service.model, body.given)
        streams = body.stream is not False
        done = msgspec.json.encode({"status": "success"}) + (b"\n" if streams else b"")
        return Response(done, media_type=NDJSON if streams else "application/json")

    @app.post("/api/create", responses=ERRORS)
    @app.post("/api/copy", responses=ERRORS)
    @app.post("/api/push", responses=ERRORS)
    @app.delete("/api/delete", responses=ERRORS)
    @app.api_route("/api/blobs/{digest}", methods=["GET", "POST"], include_in_schema=False)
    async def change_models() -> Response:
        """Refused: this server changes no models."""
        problem = "this server has one model and cannot change others; use the commands 'chairlift pull' and 'rm'"
        raise APIError(400, problem, code="unsupported_operation")


def _check_loaded(service: Service, body: types.OllamaBody) -> None:
    """Check a request that only asks for the model to be loaded."""
    check_model_name(service.model, body.model)
    body.name_ignored()
    if service.engine.state is not EngineState.READY:
        raise unavailable(f"the engine is {service.engine.state.value}")
