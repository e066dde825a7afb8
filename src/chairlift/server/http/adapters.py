"""The endpoints that register and remove adapters while the server runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field
from starlette.datastructures import State
from starlette.requests import Request

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import RequestBody
from chairlift.server.wire.errors import APIError, unavailable
from chairlift.server.wire.messages import AdapterChanged, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from chairlift.server.http.routes import Service

PATIENCE = 120.0  # seconds that the engine may take to look at an adapter

Name = Annotated[str, Field(min_length=1, max_length=200)]


class LoadRequest(RequestBody):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]  # below --lora-folder
    load_inplace: bool | None = None  # Replace the adapter of this name.


class UnloadRequest(RequestBody):
    lora_name: Name
    lora_int_id: int | None = None  # vLLM's number, which is not needed


@dataclass(eq=False)
class AdapterChanges:
    """Asks the engine for changes, and waits for its answers."""

    folder: Path | None = None  # Adapters are loaded from below it; None: from nowhere.
    on_change: Callable[[str, str | None], None] = lambda name, path: (
        None
    )  # An engine that is started again has it, too.
    _waiting: dict[str, asyncio.Future[AdapterChanged]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def receive(self, answer: AdapterChanged) -> None:
        future = self._waiting.pop(answer.request_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def path(self, given: str) -> Path:
        """The real path of an adapter; raises for one that is not below the folder."""
        if self.folder is None:
            raise APIError(403, "this server was not started with --lora-folder", code="not_allowed")
        folder = self.folder.resolve()
        try:
            path = (folder / given).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise InvalidParameter("lora_path", f"there is no {given!r:.200} below the folder of adapters") from None
        if not path.is_relative_to(folder) or path == folder:
            raise InvalidParameter("lora_path", "must be below the folder of adapters (--lora-folder)")
        return path

    async def ask(self, service: Service, command: LoadAdapter | UnloadAdapter) -> None:
        future = self._waiting[command.request_id] = asyncio.get_running_loop().create_future()
        try:
            if not service.engine.send(command):
                raise unavailable(f"the engine is {service.engine.state.value}")
            answer = await asyncio.wait_for(future, PATIENCE)
        except TimeoutError:
            raise unavailable("the engine did not answer in time") from None
        finally:
            self._waiting.pop(command.request_id, None)
        if answer.problem is not None:
            raise InvalidParameter(answer.parameter or "lora_path", answer.problem)

    def next_id(self) -> str:
        return f"adapter-{next(self._numbers)}"


def add_adapter_routes(app: FastAPI, service: Service) -> None:
    changes = service.adapter_changes

    @app.post("/v1/load_lora_adapter", include_in_schema=False)
    async def load(body: LoadRequest, http: Request) -> Response:
        _check_allowed(http.state, service)
        path = changes.path(body.lora_path)
        served = service.model.adapters
        if body.lora_name in service.model.names:
            raise InvalidParameter("lora_name", f"{body.lora_name!r} is the name of the base model")
        if served.get(body.lora_name) is not None and not body.load_inplace:
            problem = f"{body.lora_name!r} is loaded already; load_inplace replaces it"
            raise InvalidParameter("lora_name", problem)
        await changes.ask(service, LoadAdapter(changes.next_id(), body.lora_name, str(path)))
        served.add(body.lora_name)
        changes.on_change(body.lora_name, str(path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.get("/lora-adapters", include_in_schema=False)
    async def numbered() -> list[dict[str, Any]]:
        """The adapters by their numbers, as llama.cpp's server lists them; requests choose by `lora`."""
        return [{"id": id_, "path": name, "scale": 0.0} for id_, name in enumerate(service.model.adapters.names)]

    @app.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def unload(body: UnloadRequest, http: Request) -> Response:
        _check_allowed(http.state, service)
        if service.model.adapters.get(body.lora_name) is None:
            raise APIError(404, f"there is no adapter {body.lora_name!r}", code="not_found", param="lora_name")
        service.model.adapters.remove(body.lora_name)
        changes.on_change(body.lora_name, None)
        await changes.ask(service, UnloadAdapter(changes.next_id(), body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(state: State, service: Service) -> None:
    """Raise unless the client may change the adapters: with keys an administrator, else a client of this machine."""
    key = state.api_key
    if not (service.policy_switch if key is None else key.is_admin):
        raise APIError(403, "this is only for keys with 'admin: true'", code="not_allowed")
