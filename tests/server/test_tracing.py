"""OpenTelemetry traces, received by a collector on a real socket."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from chairlift.errors import InvalidParameter
from chairlift.server.generation.usage import Timeline
from chairlift.server.http.boundary import check_traces_endpoint, make_tracer_provider
from tests.server.front_end import NAME, front_end
from tests.server.running_server import HTTP, RunningServer, start_server
from tests.server.running_server import NAME as TINY

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the-secret-words"


class Collector:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    bodies.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def check_phases(spans: list[Any]) -> None:
    """The phases follow each other within the request."""
    by_name = {span.name: span for span in spans}
    root = by_name["POST /v1/completions"]
    phases = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    assert {span.trace_id for span in spans} == {root.trace_id}
    for span in phases:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano


def test_a_request_is_a_trace_of_its_phases_below_the_clients_span(collector: Collector) -> None:
    provider = make_tracer_provider(collector.url)
    with front_end(tracer_provider=provider, api_keys=["alice sk-1"]) as front:
        headers = {"authorization": "Bearer sk-1", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        body = {"model": NAME, "prompt": SECRET, "stream": True}
        assert HTTP.post(front.url + "/v1/completions", json=body, headers=headers).status_code == 200
        HTTP.get(front.url + "/v1/models", headers=headers)
    spans = collector.spans()
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "decode", "prefill", "queue"]
    check_phases(spans)
    root = next(span for span in spans if span.name.startswith("POST"))
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    found = attributes(root)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.response.model"] == NAME
    assert found["gen_ai.usage.output_tokens"] == 2
    assert found["enduser.id"] == "alice"
    decode = next(span for span in spans if span.name == "decode")
    assert attributes(decode)["gen_ai.usage.output_tokens"] == 2
    assert not any(SECRET.encode() in body or b"sk-1" in body for body in collector.bodies)


def test_refused_requests_are_traced_too(collector: Collector) -> None:
    with front_end(tracer_provider=make_tracer_provider(f"{collector.url}/v1/traces")) as front:
        assert HTTP.post(front.url + "/v1/completions", json={"model": NAME}).status_code == 400
    (span,) = collector.spans()
    assert attributes(span)["http.response.status_code"] == 400
    assert span.parent_span_id == b""


def test_a_sampled_out_trace_is_not_sent(collector: Collector) -> None:
    with front_end(tracer_provider=make_tracer_provider(collector.url)) as front:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        HTTP.post(front.url + "/v1/completions", json={"model": NAME, "prompt": "a"}, headers=headers)
    assert collector.spans() == []


def test_a_server_sends_traces_and_flushes_them_at_its_end(
    collector: Collector, tiny_folder: Path, tmp_path: Path
) -> None:
    options = ["--otlp-traces-endpoint", collector.url, "--access-log", str(tmp_path / "access")]
    running: RunningServer = start_server(tiny_folder, tmp_path / "log", *options)
    running.post("/v1/completions", {"model": TINY, "prompt": SECRET, "max_tokens": 3, "ignore_eos": True})
    assert running.stop() == 0, running.tail()
    spans = collector.spans()
    check_phases(spans)
    assert spans[0].trace_id.hex() in (tmp_path / "access").read_text()
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_phases_need_their_times() -> None:
    assert Timeline(1.0).phases() == {}
    assert Timeline(1.0, admitted=2.0).phases() == {"queue": (1.0, 2.0)}
    whole = Timeline(1.0, admitted=2.0, first_token=3.0, last_token=5.0)
    assert whole.phases() == {"queue": (1.0, 2.0), "prefill": (2.0, 3.0), "decode": (3.0, 5.0)}
    assert Timeline(1.0, admitted=0.9).phases() == {"queue": (1.0, 1.0)}


def test_a_bad_endpoint_or_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="otlp_traces_endpoint: must be an http"):
        check_traces_endpoint("localhost:4317")
    check_traces_endpoint("http://localhost:4318")
    monkeypatch.setattr("chairlift.server.http.boundary.PACKAGES", ("opentelemetry_sdk_missing.part",))
    with pytest.raises(InvalidParameter, match=r"pip install 'chairlift\[otel\]'"):
        check_traces_endpoint("http://localhost:4318")


def test_the_server_does_not_import_opentelemetry_without_the_option() -> None:
    program = "import sys, chairlift.server.lifecycle; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
