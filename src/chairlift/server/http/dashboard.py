"""The dashboard's routes. The page itself needs no API key; its data does."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.requests import Request

from chairlift.core.policies.base import make_policy
from chairlift.server.dashboard.page import content_policy, dashboard_page
from chairlift.server.generation.endpoint import RequestBody
from chairlift.server.generation.reply import EventStream
from chairlift.server.http.guards import check_sees_all
from chairlift.server.http.service import Service
from chairlift.server.wire.errors import APIError, unavailable
from chairlift.server.wire.messages import SwitchPolicy

PATH = "/dashboard"


class PolicyRequest(RequestBody):
    policy: str
    max_delay_ms: float | None = None  # how long a static or dynamic batch waits to be filled


def add_dashboard_routes(app: FastAPI, service: Service) -> None:
    subscribers = service.subscribers
    page = dashboard_page()
    headers = {"Content-Security-Policy": content_policy(page), "Cache-Control": "no-cache"}

    @app.get(PATH, include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse(page, headers=headers)

    @app.get(f"{PATH}/stream", include_in_schema=False)
    async def stream(http: Request) -> Response:
        check_sees_all(http.state)
        subscriber = subscribers.subscribe(http.state.key, http.state.tenant)
        return EventStream(subscribers.stream(subscriber), on_end=lambda: subscribers.unsubscribe(subscriber))

    @app.get(f"{PATH}/requests/{{request_id}}", include_in_schema=False)
    async def texts(request_id: str, http: Request) -> dict[str, Any]:
        found = await subscribers.find_text(request_id, http.state.key)
        if found is None:
            raise APIError(404, "no text of that request is kept, or it was sent with another key", code="not_found")
        return found

    @app.post(f"{PATH}/policy", include_in_schema=False)
    async def switch_policy(body: PolicyRequest, http: Request) -> Response:
        check_sees_all(http.state)
        if not service.policy_switch:
            raise APIError(403, "this server was not started with --policy-switch", code="not_allowed")
        make_policy(body.policy, body.max_delay_ms)  # validates the name and the delay
        if not service.engine.send(SwitchPolicy(body.policy, body.max_delay_ms)):
            raise unavailable(f"the engine is {service.engine.state.value}")
        return JSONResponse({"policy": body.policy})
