"""What the server says about itself: the page at `/`, the list of its endpoints, and hints where there is none."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

import chairlift
from chairlift.server.wire.errors import APIError

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
    body = operation.get("requestBody", {}).get("content", {})
    schema = next(iter(body.values()), {}).get("schema", {})
    fields = _resolve(schema, document)
    required = fields.get("required", ())
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


# ---- paths without an endpoint ---------------------------------------------------------------------------------------

_SHOWN = 100  # characters of a path that are quoted and compared
_MAX_PARTS = 12
_PAGES = frozenset({"chat", "ui", "web", "webui", "playground", "admin", "index.html", "dashboard"})
_DOCUMENTS = frozenset({"redoc", "swagger", "swagger.json", "api-docs", "openapi.yaml", "help"})
_OTHER_SERVICES = {
    "audio": "speech",
    "images": "pictures",
    "videos": "videos",
    "moderations": "moderation",
    "fine_tuning": "training",
    "assistants": "assistants; use /v1/responses",
    "threads": "threads; use /v1/responses",
    "vector_stores": "vector stores; use /v1/embeddings",
}


class PathHints:
    """What a client may have meant by a path that no route has, at a cost that does not grow with the path."""

    def __init__(self, routes: Iterable[BaseRoute], *, dashboard: bool) -> None:
        self._dashboard = dashboard
        self._methods: dict[str, list[str]] = {}
        for route in routes:
            if isinstance(route, Route) and "{" not in route.path:
                self._methods.setdefault(route.path, []).extend(sorted((route.methods or set()) - {"HEAD"}))
        self._by_key = {_key(path): path for path in reversed(self._methods)}

    def unknown_path(self, path: str) -> APIError:
        shown = path[:_SHOWN]
        return APIError(404, f"there is nothing at {shown!r}; {self._hint(shown)}", code="unknown_url")

    def wrong_method(self, path: str, method: str, allowed: str) -> APIError:
        takes = ", ".join(name for name in allowed.split(", ") if name != "HEAD")
        problem = f"{path[:_SHOWN]!r} takes {takes}, not {method[:20]}"
        return APIError(405, problem, code="method_not_allowed", headers={"Allow": allowed})

    def _hint(self, path: str) -> str:
        if found := self._closest(path):
            return f"did you mean {' or '.join(self._methods[found])} {found}?"
        parts = {part.lower() for part in path.split("/")[:_MAX_PARTS]}
        if parts & _PAGES and "v1" not in parts:
            other = "is off here (--no-dashboard)" if not self._dashboard else "is at /dashboard"
            return f"the page for people, with a chat, {other}"
        if parts & _DOCUMENTS:
            return f"the endpoints are listed at {DOCS_PATH} and in /openapi.json"
        for name in parts & _OTHER_SERVICES.keys():
            return f"this server has no {_OTHER_SERVICES[name]}"
        return f"the endpoints are listed at {DOCS_PATH}"

    def _closest(self, path: str) -> str | None:
        """Return the route whose path is in this one, or else the one that is written most like it."""
        parts = [part for part in path.split("/") if part][:_MAX_PARTS]
        for begin in range(len(parts)):
            tail = "/".join(parts[begin:])
            for prefix in ("/", "/v1/"):
                if found := self._by_key.get(_key(prefix + tail)):
                    return found
        longer = [known for known in self._methods if len(parts) > 1 and known.startswith("/" + "/".join(parts) + "/")]
        if longer:
            return longer[0]
        written = difflib.get_close_matches(path.lower(), self._methods, n=1, cutoff=0.8)
        return written[0] if written else None


def _key(path: str) -> str:
    """Return what paths share that differ in case, hyphens, and singular or plural."""
    return "/".join(part.rstrip("s") for part in re.sub(r"[-_]", "", path.lower()).split("/") if part)


def add_pages(app: FastAPI, model: str, *, completes: bool, dashboard: bool) -> None:
    """Add the front page and the page of the endpoints."""
    endpoints = cache(lambda: _endpoints(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def root(http: Request) -> Response:
        return front_page(http, model, completes=completes, dashboard=dashboard)

    @app.get(DOCS_PATH, include_in_schema=False)
    def docs() -> Response:  # in a thread, because the document takes a while the first time
        return _page("Chairlift: endpoints", endpoints())
