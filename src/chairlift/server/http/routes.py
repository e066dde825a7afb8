"""The routes of the API, and the components of the HTTP front end, which they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

import chairlift
from chairlift.core.policies.base import POLICIES
from chairlift.errors import InvalidParameter
from chairlift.server.access import RateLimiter, RateLimits
from chairlift.server.anthropic.endpoint import MessagesGeneration, chat_of, model_info, model_page, tokenize_messages
from chairlift.server.anthropic.errors import is_anthropic_client
from chairlift.server.anthropic.types import CountTokensRequest, MessagesRequest
from chairlift.server.generation.admission import AdmissionControl
from chairlift.server.generation.handler import GenerationHandler, check_model_name
from chairlift.server.generation.reply import PIECE, json_pieces
from chairlift.server.generation.usage import Usage
from chairlift.server.http.adapters import AdapterChanges
from chairlift.server.http.dashboard import Subscribers
from chairlift.server.http.guards import check_sees_all
from chairlift.server.metrics import Metrics
from chairlift.server.openai.chat import ChatGeneration, TextGeneration, encode_messages
from chairlift.server.openai.pooling import (
    EmbeddingGeneration,
    EmbeddingRequest,
    RerankGeneration,
    RerankRequest,
    ScoreGeneration,
    ScoreRequest,
)
from chairlift.server.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_token_ids,
)
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.responses.endpoint import ResponsesGeneration
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import unavailable
from chairlift.server.wire.limits import Limits

MAX_COUNTED_TOKENS = 2**31  # The limit of a prompt while the engine is loading and its own is unknown.
CHARACTERS_PER_TOKEN = 4  # about
TextJobResult = tuple[bytes, int]  # JSON, and how many tokens it is about

_ERROR = {"description": "An error in OpenAI's shape", "content": {"application/json": {}}}
# "default" also removes FastAPI's description of validation errors, which this server never sends.
ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    ("default", 400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503, 507), _ERROR
)


@dataclass(eq=False)
class Service(GenerationHandler):
    """What the routes of one process share."""

    rate_limits: RateLimits = field(kw_only=True)
    policy_switch: bool = field(default=False, kw_only=True)  # whether clients may change the running engine's policy
    lora_folder: Path | None = field(default=None, kw_only=True)  # Adapters may be loaded from below it.

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adapter_changes = AdapterChanges(self.lora_folder)
        self.subscribers = Subscribers(self.engine, self.metrics, self.texts, greeting=self._greeting)

    @classmethod
    def local(
        cls, model: ServedModel, engine: EngineClient, metrics: Metrics, limits: Limits, **options: Any
    ) -> Service:
        """Build a front end that alone decides what its engine gets."""
        metrics.watch_engine(engine)
        admission = AdmissionControl(engine, metrics, limits)
        service = cls(model, engine, metrics, limits, admission, rate_limits=RateLimiter(metrics), **options)
        engine.on_adapter, service.adapter_changes.on_change = service.adapter_changes.receive, engine.keep_adapter
        return service

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence of the loaded model; None until it is loaded."""
        return self.engine.loaded.limits.max_model_len if self.engine.loaded else None

    def _greeting(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "version": chairlift.__version__,
            "has_chat": self.model.tokenizer.chat_template is not None,
            "has_reasoning": self.model.reasoning_format is not None,
            "sampling": dict(self.model.sampling),
            "policy_switch": self.policy_switch,
            "policies": POLICIES.names(),
            "max_model_len": self.max_model_len,
            "presets": [*self.model.defaults.presets],
        }


def add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Completes a text, as OpenAI's."""
        return await service.handle(TextGeneration(body, service.model), http)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answers a conversation, as OpenAI's."""
        params = body.params(service.model)
        request = ChatGeneration(body, service.model, params, params.max_tokens, streams=bool(body.stream))
        return await service.handle(request, http)

    @app.post("/v1/messages", responses=ERRORS)
    async def messages(body: MessagesRequest, http: Request) -> Response:
        """Answers a conversation, as Anthropic's."""
        return await service.handle(MessagesGeneration(body, service.model, http.state.request_id), http)

    @app.post("/v1/embeddings", responses=ERRORS)
    async def embeddings(body: EmbeddingRequest, http: Request) -> Response:
        """Vectors of texts, as OpenAI's."""
        return await service.handle(EmbeddingGeneration(body, service.model), http)

    @app.post("/v1/score", responses=ERRORS)
    @app.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest, http: Request) -> Response:
        """How well texts go with a query."""
        return await service.handle(ScoreGeneration(body, service.model), http)

    @app.post("/v1/rerank", responses=ERRORS)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/rerank", include_in_schema=False)
    async def rerank(body: RerankRequest, http: Request) -> Response:
        """Documents in the order in which they go with a query, as Jina's and Cohere's."""
        return await service.handle(RerankGeneration(body, service.model), http)

    @app.get("/v1/models", responses=ERRORS)
    async def models(http: Request) -> dict[str, Any]:
        """The names that requests may use."""
        cards = [_model_card(service, name, http) for name in service.model.all_names]
        return model_page(cards) if is_anthropic_client(http.scope) else {"object": "list", "data": cards}

    @app.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str, http: Request) -> dict[str, Any]:
        """One of the names."""
        check_model_name(service.model, model)
        return _model_card(service, model, http)


def _model_card(service: Service, name: str, http: Request) -> dict[str, Any]:
    if is_anthropic_client(http.scope):
        return model_info(name, service.model.created, service.max_model_len)
    card = {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "chairlift",
        "root": service.model.name,
        "max_model_len": service.max_model_len,
    }
    adapter = service.model.adapters.get(name)
    return card if adapter is None else card | {"created": adapter.created, "root": name, "parent": service.model.name}


def add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        """The tokens of a text or a conversation."""
        check_model_name(service.model, body.model)
        work = partial(_tokenize, body, service.model, service.max_model_len)
        return await run_text_job(service, http, len(await http.body()), work)

    @app.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(body: CountTokensRequest, http: Request) -> Response:
        """The number of tokens of a conversation, as Anthropic's."""
        check_model_name(service.model, body.model)
        work = partial(_count_tokens, body, service.model, service.max_model_len)
        return await run_text_job(service, http, len(await http.body()), work)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        """The text of tokens."""
        check_model_name(service.model, body.model)
        return await run_text_job(service, http, len(body.tokens), partial(_detokenize, body, service.model))


async def run_text_job(service: Service, http: Request, size: int, work: Callable[[], TextJobResult]) -> Response:
    """Respond with the JSON of `work`, which runs in a thread; `size` decides in which. The client's key is charged the
    tokens, whose number is estimated until the work is done."""
    tenant = http.state.tenant or ""
    await http.state.parsing.aclose()
    with service.admission.reserve_text_job(tenant):
        usage = Usage(1 + size // CHARACTERS_PER_TOKEN)
        if http.state.allowance is not None:
            await http.state.allowance.charge(usage.prompt_tokens)
        http.state.usage = usage  # It counts even if the client leaves.
        images = service.model.may_read_images(await http.body())
        pool = service.tokenizer_pool
        content, usage.prompt_tokens = await pool.run_text_job(tenant, size, work, images=images)
        return Response(content, media_type="application/json")


def _count_tokens(body: CountTokensRequest, model: ServedModel, max_model_len: int | None) -> TextJobResult:
    tokenized = tokenize_messages(body, chat_of(body, model), max_model_len or MAX_COUNTED_TOKENS)
    answer: dict[str, Any] = {"input_tokens": len(tokenized.prompt.tokens)}
    if tokenized.edits is not None:
        answer["context_management"] = {"original_input_tokens": tokenized.original_tokens}
    return msgspec.json.encode(answer), answer["input_tokens"]


async def run_input_tokens(service: Service, http: Request, request: ResponsesGeneration) -> Response:
    """Respond with the number of tokens of a request's prompt."""
    size = len(await http.body()) + request.more_text
    return await run_text_job(service, http, size, partial(_input_tokens, request, service.max_model_len))


def _input_tokens(request: ResponsesGeneration, max_model_len: int | None) -> TextJobResult:
    try:
        (prompt,) = request.tokenize(max_model_len or MAX_COUNTED_TOKENS).prompts
    except InvalidParameter as error:
        raise request.rename_error(error) from None
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(prompt)}), len(prompt)


def _tokenize(body: TokenizeRequest, model: ServedModel, max_model_len: int | None) -> TextJobResult:
    tokens = _token_ids(body, model)
    shown: list[Any] = [*_encoded_pieces(tokens, model)] if body.with_pieces else tokens
    entries = [model.tokenizer.entry(token) for token in tokens] if body.return_token_strs else None
    answer = {"tokens": shown, "count": len(tokens), "max_model_len": max_model_len, "token_strs": entries}
    return b"".join(json_pieces(answer)), len(tokens)


def _encoded_pieces(tokens: list[int], model: ServedModel) -> Iterator[msgspec.Raw]:
    """Yield the JSON of the pieces, many at a time: as objects, those of a long text would take gigabytes."""
    for begin in range(0, len(tokens), PIECE):
        pieces = [_piece(token, model) for token in tokens[begin : begin + PIECE]]
        yield msgspec.Raw(msgspec.json.encode(pieces)[1:-1])


def _piece(token: int, model: ServedModel) -> dict[str, Any]:
    data = model.tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def _token_ids(body: TokenizeRequest, model: ServedModel) -> list[int]:
    if [body.prompt, body.content, body.messages].count(None) != 2:
        raise InvalidParameter("prompt", "give either prompt (or content) or messages")
    given = body.add_special_tokens if body.add_special is None else body.add_special
    if body.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise InvalidParameter(name, "only goes with messages")
        special = body.content is None if given is None else given
        return model.tokenizer.encode(body.prompt or body.content or "", add_special_tokens=special)
    tokens = encode_messages(
        model,
        body.messages,
        body.tools,
        system_prompt=model.defaults_of(body.model).system_prompt,
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    return [*model.tokenizer.first_ids, *tokens] if given else tokens  # a chat template writes its own


def _detokenize(body: DetokenizeRequest, model: ServedModel) -> TextJobResult:
    text = model.tokenizer.decode(check_token_ids("tokens", body.tokens))
    # vLLM has the first name; llama.cpp, whose clients name no model, has the second.
    names = ("prompt", "content") if body.model is None else ("prompt",)
    return msgspec.json.encode(dict.fromkeys(names, text)), len(body.tokens)


def add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """200 while the engine is ready, 503 while it is starting or restarting."""
        if service.engine.state is not EngineState.READY:
            return unavailable(f"the engine is {service.engine.state.value}").response()
        return JSONResponse({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        """The probe of SageMaker and of vLLM."""
        return await health()

    @app.get("/ready", responses=ERRORS)
    async def ready() -> Response:
        """Like /health, but also 503 while the server is shutting down."""
        if service.admission.draining:
            return unavailable("the server is shutting down").response()
        return await health()

    @app.get("/metrics", responses=ERRORS)
    async def metrics(http: Request) -> Response:
        """The metrics, for Prometheus."""
        check_sees_all(http.state)
        return Response(await service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        """The version of Chairlift."""
        return {"version": chairlift.__version__}
