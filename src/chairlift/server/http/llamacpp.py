"""The routes of llama.cpp's server that no other server has."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request

import chairlift
from chairlift.core.sampling.params import SamplingParams
from chairlift.server.generation.handler import check_model_name
from chairlift.server.http.guards import check_sees_all
from chairlift.server.http.routes import ERRORS, Service, TextJobResult, run_text_job
from chairlift.server.llamacpp import endpoint, types
from chairlift.server.openai.chat import checked_variables, encode_messages
from chairlift.server.openai.pooling import RerankGeneration, RerankRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError, unavailable


def add_llamacpp_routes(app: FastAPI, service: Service) -> None:
    @app.post("/completion", responses=ERRORS)
    async def completion(body: types.LlamaCompletionRequest, http: Request) -> Response:
        """Completes prompts, as llama.cpp's."""
        return await service.handle(endpoint.LlamaCompletionGeneration(body, service.model, http.state.timelines), http)

    @app.post("/infill", responses=ERRORS)
    async def infill(body: types.InfillRequest, http: Request) -> Response:
        """Fills in code between a prefix and a suffix, as llama.cpp's."""
        return await service.handle(endpoint.InfillGeneration(body, service.model, http.state.timelines), http)

    @app.post("/embedding", responses=ERRORS)
    async def embedding(body: types.LlamaEmbeddingRequest, http: Request) -> Response:
        """Vectors of texts, as llama.cpp's."""
        return await service.handle(endpoint.LlamaEmbeddingGeneration(body, service.model), http)

    @app.post("/reranking", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    async def reranking(body: RerankRequest, http: Request) -> Response:
        return await service.handle(RerankGeneration(body, service.model), http)

    @app.post("/apply-template", responses=ERRORS)
    async def apply_template(body: types.ApplyTemplateRequest, http: Request) -> Response:
        """The prompt of a conversation as text, as llama.cpp's."""
        check_model_name(service.model, body.model)
        work = partial(_apply_template, body, service.model)
        return await run_text_job(service, http, len(await http.body()), work)

    @app.get("/props", responses=ERRORS)
    async def props() -> dict[str, Any]:
        """The settings of the server and the chat template, as llama.cpp's."""
        model, loaded, tokenizer = service.model, service.engine.loaded, service.model.tokenizer
        defaults = SamplingParams.with_defaults(model.sampling, max_tokens=None)
        slot: dict[str, Any] = {"id": 0, "n_ctx": service.max_model_len, "is_processing": False}
        slot["params"] = endpoint.generation_settings(defaults, service.max_model_len)
        return {
            "default_generation_settings": slot,
            "total_slots": loaded.max_batch_requests if loaded else 0,
            "model_alias": model.name,
            "model_path": model.name,  # The real path is nothing for clients to know.
            "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"chairlift {chairlift.__version__}",
            "is_sleeping": False,
        }

    @app.post("/props", responses=ERRORS)
    async def change_props() -> Response:
        """Refused: the properties do not change."""
        problem = "the properties of this server cannot be changed while it runs"
        raise APIError(400, problem, code="unsupported_operation")

    @app.get("/slots", responses=ERRORS)
    async def slots(http: Request, fail_on_no_slot: str | None = None) -> list[dict[str, Any]]:
        """The slots, as llama.cpp's: as many are busy as there are requests that do not wait in the queue."""
        check_sees_all(http.state)
        if service.engine.loaded is None:
            raise unavailable("the engine is starting")
        waiting = service.metrics.value(service.metrics.waiting)
        total, busy = service.engine.loaded.max_batch_requests, service.engine.num_open - waiting
        if fail_on_no_slot and busy >= total:
            raise unavailable("no slot is available")
        return [
            {"id": index, "n_ctx": service.max_model_len, "speculative": False, "is_processing": index < busy}
            for index in range(total)
        ]


def _apply_template(body: types.ApplyTemplateRequest, model: ServedModel) -> TextJobResult:
    tokens = encode_messages(
        model,
        body.messages,
        body.tools,
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        system_prompt=model.defaults_of(body.model).system_prompt,
        **checked_variables(body.chat_template_kwargs, model.tokenizer),
    )
    prompt = model.tokenizer.decode(tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": prompt}), len(tokens)
