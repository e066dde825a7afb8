"""A server without keys answers only to the server's own names."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.batch.folder import FilesFolder
from chairlift.server.http.guards import HostNames
from tests.server.front_end import NAME, front_end
from tests.server.running_server import HTTP

REQUEST = {"model": NAME, "prompt": "the lift", "max_tokens": 2}

OWN = ("localhost", "LOCALHOST:8000", "a.localhost:80", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "localhost.", "")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[evil.example]",
    "x",
)


def test_own_names_and_addresses_are_allowed_and_others_are_not() -> None:
    names = HostNames("gpu-box", ["Proxy.example"])
    for own in (*OWN, "gpu-box:9", "proxy.example", socket.gethostname()):
        assert names.allow(own), own
    for foreign in FOREIGN:
        assert not names.allow(foreign), foreign
    assert HostNames(allowed=["*"]).allow("evil.example")


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a b"])
def test_an_invalid_host_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="allowed_host"):
        HostNames(allowed=[name])


def test_other_host_names_only_reach_the_health_routes() -> None:
    with front_end(hosts=HostNames("0.0.0.0")) as front:

        def get(path: str, host: str) -> httpx.Response:
            return HTTP.get(front.url + path, headers={"Host": host})

        pages = ("", "/", "/stream", "/requests/x")
        for path in [f"/dashboard{page}" for page in pages] + ["/v1/models", "/metrics", "/openapi.json", "/nowhere"]:
            refused = get(path, "gpu-box.lan:8000").json()["error"]
            assert refused["code"] == "host_not_allowed", path
            assert "gpu-box.lan:8000" in refused["message"]
            assert "--allowed-host" in refused["message"]
        for path, body in (("/v1/completions", REQUEST), ("/dashboard/policy", {"policy": "static"})):
            assert HTTP.post(front.url + path, json=body, headers={"Host": "evil.example"}).status_code == 403
        assert not front.engine.received
        assert [get(path, "evil.example").status_code for path in ("/health", "/ready")] == [200, 200]
        for own in (f"localhost:{front.port}", "192.168.1.7", socket.gethostname()):
            assert [get(path, own).status_code for path in ("/dashboard", "/v1/models")] == [200, 200]


def test_pages_of_other_origins_can_upload_nothing_to_a_server_without_keys(tmp_path: Path) -> None:
    """A browser sends such a form without asking the server."""
    listed, foreign = "https://chat.example", "https://evil.example"
    with front_end(files=FilesFolder(tmp_path, 2**20), cors_origins=[listed]) as front:

        def upload(**headers: str) -> httpx.Response:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            form = {"file": ("a.jsonl", b"{}\n")}
            return HTTP.post(front.url + "/v1/files", data={"purpose": "batch"}, files=form, headers=names)

        own = f"http://127.0.0.1:{front.port}"
        for allowed in (
            {},
            {"origin": listed, "sec_fetch_site": "cross-site"},
            {"origin": own},
            {"origin": "https://proxy.example", "sec_fetch_site": "same-origin"},  # a proxy changed the host's name
        ):
            assert upload(**allowed).status_code == 200, allowed
        for refused in (
            {"origin": foreign},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:1"},
            {"origin": "http://["},
            {"origin": own + "/"},
            {"origin": foreign, "sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},
        ):
            answer = upload(**refused)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), refused
        assert len(HTTP.get(front.url + "/v1/files", headers={"origin": foreign}).json()["data"]) == 4
        page = {"Origin": foreign}
        assert HTTP.post(f"{front.url}/v1/completions", json=REQUEST, headers=page).status_code == 403
    with front_end(api_keys=["sesame"]) as front:  # a page cannot send a key without asking first
        keyed = {"Origin": foreign, "Authorization": "Bearer sesame"}
        assert HTTP.post(f"{front.url}/v1/completions", json=REQUEST, headers=keyed).status_code == 200


def test_allowed_names_work_and_servers_with_keys_accept_any_name() -> None:
    foreign = {"Host": "lift.example"}
    with front_end(hosts=HostNames(allowed=["lift.example"])) as front:
        for path in ("/dashboard", "/v1/models"):
            assert HTTP.get(front.url + path, headers=foreign).status_code == 200
    with front_end(api_keys=["sesame"]) as front:
        keyed = foreign | {"Authorization": "Bearer sesame"}
        assert HTTP.get(f"{front.url}/v1/models", headers=keyed).status_code == 200
        assert HTTP.post(f"{front.url}/v1/completions", json=REQUEST, headers=keyed).status_code == 200
        assert HTTP.get(f"{front.url}/dashboard", headers=foreign).status_code == 200
        assert HTTP.get(f"{front.url}/dashboard/stream", headers=foreign).status_code == 401
