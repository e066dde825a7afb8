"""The HTTP front end in this process, on a real socket, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from chairlift.core.request import RequestLimits
from chairlift.loading.request_defaults import RequestDefaults
from chairlift.server.access import KeySources, KeyTable
from chairlift.server.application import make_app
from chairlift.server.http.listener import Certificate, UvicornServer
from chairlift.server.http.routes import Service
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient, EngineState
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Loaded, Submit, ToEngine, Update, decode_to_engine
from chairlift.text.tokenizer import Tokenizer
from tests.server.running_server import WAIT_SECONDS, wait_for
from tests.tiny import CHATML, byte_level_tokenizer

NAME = "scripted"
LOADED = Loaded(RequestLimits(vocab_size=320, max_model_len=256), max_batch_requests=8)


class ScriptedEngine(EngineClient):
    """An engine client without a process; `script` is called with every message to the engine."""

    def __init__(
        self, metrics: Metrics, script: Callable[[ScriptedEngine, ToEngine], None], loaded: Loaded = LOADED
    ) -> None:
        super().__init__("model", {}, metrics.record_step, metrics.record_restart)
        self.received: list[ToEngine] = []
        self._script = script
        self._when_loaded = loaded

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loaded = self._when_loaded
        self.state = EngineState.READY
        self._handle = self  # type: ignore[assignment]

    async def stop(self, timeout: float = 5.0) -> None:
        self._fail_all(RuntimeError("stopped"))
        self._context.destroy(linger=0)

    def _send(self, message: bytes) -> None:
        self.received.append(decode_to_engine(message))
        self._script(self, self.received[-1])

    def publish(self, update: Update, after: float = 0.0) -> None:
        """Deliver an update; callable from any thread."""
        self.loop.call_soon_threadsafe(self.loop.call_later, after, self.requests.deliver, update)


def answer_ok(engine: ScriptedEngine, message: ToEngine) -> None:
    """Answers each completion with two tokens."""
    if isinstance(message, Submit):
        engine.publish(Update(message.request_id, text="o", tokens=[5], cached_tokens=0))
        engine.publish(Update(message.request_id, text="k", tokens=[6], finish_reason="length"))


def stay_silent(engine: ScriptedEngine, message: ToEngine) -> None:
    """Accepts all requests and answers none."""


class FrontEnd:
    def __init__(self, service: Service, engine: ScriptedEngine, port: int) -> None:
        self.service = service
        self.engine = engine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)

    def post_and_disconnect(self, path: str, body: dict[str, Any], **headers: str) -> None:
        """Send a request that the engine does not answer, and disconnect when it has reached the engine."""
        data, before = json.dumps(body).encode(), len(self.engine.received)
        lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        with self.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            wait_for(lambda: len(self.engine.received) > before, "the request to reach the engine")

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics._registry.get_sample_value(f"chairlift_{name}", labels) or 0.0


@contextmanager
def front_end(
    script: Callable[[ScriptedEngine, ToEngine], None] = answer_ok,
    *,
    limits: Limits | None = None,
    tokenizer: Tokenizer | None = None,
    loaded: Loaded = LOADED,
    service_options: dict[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    defaults: RequestDefaults | None = None,
    api_keys: Sequence[str] = (),
    keys: KeyTable | None = None,
    certificate: Certificate | None = None,
    **options: Any,
) -> Iterator[FrontEnd]:
    limits = limits or Limits()
    metrics = Metrics()
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    made: list[FrontEnd] = []
    servers: list[UvicornServer] = []

    async def run() -> None:
        engine = ScriptedEngine(metrics, script, loaded)  # its sockets belong to this thread's event loop
        text = tokenizer or Tokenizer(byte_level_tokenizer(), chat_template=CHATML)
        model = ServedModel.create(NAME, text, defaults=defaults or RequestDefaults(sampling or {}))
        service = Service.local(model, engine, metrics, limits, **(service_options or {}))
        made.append(FrontEnd(service, engine, listener.getsockname()[1]))
        app = make_app(service, keys or KeyTable(KeySources(api_keys).read()), **options)
        server = UvicornServer(app, limits, certificate)
        servers.append(server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(WAIT_SECONDS)
    try:
        yield made[0]
    finally:
        servers[0].should_exit = True
        thread.join(WAIT_SECONDS)
