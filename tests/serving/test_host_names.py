"""A dashboard without a key answers only to the server's own names."""

from __future__ import annotations

import socket

import httpx
import pytest

from chairlift.errors import InvalidParameter
from chairlift.serving.host_names import HostNames
from tests.serving.front_end import front_end

OWN = ("localhost", "LOCALHOST:8000", "a.localhost:80", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "localhost.", "")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[evil.example]",
    "x",
)


def test_own_names_and_addresses_are_known_and_others_are_not() -> None:
    names = HostNames("gpu-box", ["Proxy.example"])
    for own in (*OWN, "gpu-box:9", "proxy.example", socket.gethostname()):
        assert names.include(own), own
    for foreign in FOREIGN:
        assert not names.include(foreign), foreign
    assert HostNames(allowed=["*"]).include("evil.example")


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a b"])
def test_a_name_is_a_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match="allowed_host"):
        HostNames(allowed=[name])


@pytest.mark.parametrize("path", ["", "/", "/stream", "/requests/x", "/policy"])
def test_a_foreign_name_sees_nothing_of_the_dashboard(path: str) -> None:
    with front_end() as front:
        method = "POST" if path == "/policy" else "GET"
        refused = httpx.request(method, f"{front.url}/dashboard{path}", headers={"Host": "evil.example:8000"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        assert httpx.get(f"{front.url}/health", headers={"Host": "evil.example"}).status_code == 200
        assert httpx.get(f"{front.url}/dashboard", headers={"Host": f"localhost:{front.port}"}).status_code == 200


def test_names_that_are_allowed_and_servers_with_keys_answer_to_all() -> None:
    foreign = {"Host": "lift.example"}
    with front_end(hosts=HostNames(allowed=["lift.example"])) as front:
        assert httpx.get(f"{front.url}/dashboard", headers=foreign).status_code == 200
    with front_end(api_keys=["sesame"]) as front:
        assert httpx.get(f"{front.url}/dashboard", headers=foreign).status_code == 200
        assert httpx.get(f"{front.url}/dashboard/stream", headers=foreign).status_code == 401
