"""What the server says about itself: the page at `/` with its links, and the list of its endpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.requests import Request

import chairlift

DOCS_PATH = "/docs"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


@cache
def _template() -> Template:
    page = files("chairlift.server.dashboard") / "web" / "page.html"
    return Template(page.read_text(encoding="utf-8"))


def _page(title: str, body: str) -> Response:
    return HTMLResponse(_template().substitute(title=escape(title), body=body), headers=_HEADERS)


# ---- the front page --------------------------------------------------------------------------------------------------

_LINKS = {
    "dashboard": ("/dashboard", "Dashboard and chat", "talk to the model, and see the engine work"),
    "docs": (DOCS_PATH, "Endpoints", "what can be sent to this server"),
    "openapi": ("/openapi.json", "OpenAPI document", "the same for programs"),
    "models": ("/v1/models", "Models", "the names that requests may use"),
    "health": ("/health", "Health", "200 once the engine is ready"),
    "metrics": ("/metrics", "Metrics", "for Prometheus"),
}
_KEYLESS = ("dashboard", "docs", "health")
_HOST = re.compile(r"[\w.:\[\]-]{1,255}", re.ASCII)  # An invalid name is not repeated, since it ends up in a shell.


def front_page(http: Request, model: str, *, completes: bool, dashboard: bool, fleet: bool = False) -> Response:
    """Return the links of a server: a page for browsers, JSON for programs.

    The name and version of the model's server are only for clients that may see them. `completes`: whether the model
    has no chat template."""
    may_see = http.state.has_access
    names = [name for name in _LINKS if dashboard or name != "dashboard"]
    about = {"version": chairlift.__version__, "model": model} if may_see else {}
    if "text/html" not in http.headers.get("accept", ""):
        links = {name: _LINKS[name][0] for name in names}
        text = json.dumps({"name": "chairlift", "api": "/v1", **about, "links": links}, indent=2)
        return Response(text + "\n", media_type="application/json", headers={"Vary": "Accept"})
    rows = "".join(_link_row(name, may_open=may_see or name in _KEYLESS) for name in names)
    kind = "a fleet of inference servers" if fleet else "an inference server"
    facts = f"<b>{escape(model)}</b> · Chairlift {escape(chairlift.__version__)}, {kind}"
    if not may_see:
        who = "programs send, and the dashboard asks for" if dashboard else "programs send"
        facts = f"Chairlift, {kind}. It requires an API key, which {who}."
    example = escape(_example(http, model, completes=completes))
    body = f"""<h1>Chairlift</h1><p>{facts}</p><ul class="links">{rows}</ul>
<h2>Try it</h2><pre tabindex="0" aria-label="A command that sends a request">{example}</pre>
<p class="hint">Clients of OpenAI's and Anthropic's APIs take this address with or without <code>/v1</code>.</p>"""
    return _page("Chairlift", body)


def _link_row(name: str, *, may_open: bool) -> str:
    path, title, what = _LINKS[name]
    # A relative link also works behind a proxy that serves this page under another path.
    linked = f'<a href="{path[1:]}">{title}</a>' if may_open else f"<span>{title}</span>"
    return f"<li>{linked}<code>{path}</code><small>{what}{'' if may_open else ' (needs the key)'}</small></li>"


def _example(http: Request, model: str, *, completes: bool) -> str:
    """Return a command that sends a request to this server."""
    host = http.headers.get("host", "")
    url = f"{http.url.scheme}://{host if _HOST.fullmatch(host) else 'SERVER'}"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    path, body = "/v1/chat/completions", {**asked, "max_tokens": 100}
    if completes:
        path, body = "/v1/completions", {"prompt": "The sky is", "max_tokens": 50}
    lines = [f"curl {url}{path}", "  -H 'Content-Type: application/json'"]
    if not http.state.has_access:
        lines.append('  -H "Authorization: Bearer $API_KEY"')
    return " \\\n".join([*lines, f"  -d '{json.dumps(body)}'"])


# ---- the endpoints ---------------------------------------------------------------------------------------------------


def _endpoints(document: Mapping[str, Any]) -> str:
    """Return the HTML of all endpoints in an OpenAPI document."""
    operations = ((path, *one) for path, methods in document["paths"].items() for one in methods.items())
    parts = [_operation(path, method, operation, document) for path, method, operation in operations]
    intro = 'As a document for programs: <a href="openapi.json">openapi.json</a>. <a href="./">Back to the links</a>.'
    return f"<h1>Endpoints</h1><p>{intro}</p>{''.join(parts)}"


def _operation(path: str, method: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    what = operation.get("description") or operation.get("summary", "")
    head = f'<b class="{method}">{method.upper()}</b> <code>{escape(path)}</code> <small>{escape(what)}</small>'
    bodies: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    fields = _resolve(next((body["schema"] for body in bodies.values()), {}), document)
    required: list[str] = fields.get("required", [])
    named = sorted(fields.get("properties", {}).items(), key=lambda item: item[0] not in required)
    rows = [_field_row(name, one, is_required=name in required) for name, one in named]
    if not rows:
        return f'<p class="operation">{head}</p>'
    table = f"<table><thead><tr><th>Field</th><th>Type</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<details class="operation"><summary>{head}</summary>{table}</details>'


def _field_row(name: str, schema: Mapping[str, Any], *, is_required: bool) -> str:
    need = " <small>required</small>" if is_required else ""
    return f"<tr><td><code>{escape(name)}</code>{need}</td><td>{escape(_type_words(schema))}</td></tr>"


def _resolve(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return document["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def _type_words(schema: Mapping[str, Any]) -> str:
    """Return a type of a JSON schema in a few words."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            kinds = (_type_words(one) for one in schema[union] if one.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return ", ".join(map(repr, values)).replace("'", '"')
    kind = str(schema.get("type", "any"))
    return f"{kind} of {_type_words(schema['items'])}" if kind == "array" and "items" in schema else kind


def add_pages(app: FastAPI, model: str, *, completes: bool, dashboard: bool) -> None:
    """Add the front page and the page of the endpoints."""
    endpoints = cache(lambda: _endpoints(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def root(http: Request) -> Response:
        return front_page(http, model, completes=completes, dashboard=dashboard)

    @app.get(DOCS_PATH, include_in_schema=False)
    def docs() -> Response:  # It runs in a thread, because the document takes a while the first time.
        return _page("Chairlift: endpoints", endpoints())
