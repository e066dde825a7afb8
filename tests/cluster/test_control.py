"""What happens to a fleet that cannot start or be updated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.cluster.options import ClusterOptions
from chairlift.errors import ChairliftError
from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig
from chairlift.server.http.listener import Certificate

serve = pytest.importorskip("ray.serve", reason="needs Ray: pip install 'chairlift[ray]'")

CONFIG, OPTIONS = ServerConfig("tiny"), ClusterOptions()


class FakeServe:
    """Ray Serve with applications that start, except those in `broken`; ingresses answer with `status`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *running: str, broken: tuple[str, ...] = ()) -> None:
        self.running, self.broken, self.started = set(running), broken, list[str]()
        self.status: dict[str, str] | None = None  # None: no answer
        monkeypatch.setattr(serve, "start", lambda **_: None)
        monkeypatch.setattr(serve, "run", self._run)
        monkeypatch.setattr(serve, "delete", self.running.discard)
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=self.running))
        remote = SimpleNamespace(remote=lambda: SimpleNamespace(result=self._result))
        monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: SimpleNamespace(status=remote))

    def _run(self, _: Any, *, name: str, route_prefix: None) -> None:
        self.started.append(name)
        self.running.add(name)
        if name in self.broken:
            raise RuntimeError("no")

    def _result(self, timeout_s: float) -> dict[str, str]:
        if self.status is None:
            raise TimeoutError
        return self.status


@pytest.mark.parametrize("broken", ["a", "a-ingress"])
def test_nothing_is_left_of_a_fleet_that_cannot_start(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    from chairlift.cluster.serving.fleet import start_fleet

    fake = FakeServe(monkeypatch, broken=(broken,))
    with pytest.raises(ChairliftError, match="cannot start: no"):
        start_fleet("a", CONFIG, OPTIONS)
    assert fake.running == set()


@pytest.mark.parametrize("broken", ["a", "a-ingress"])
def test_a_fleet_whose_update_fails_goes_on(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    from chairlift.cluster.serving.fleet import start_fleet

    fake = FakeServe(monkeypatch, "a", "a-ingress", broken=(broken,))
    fake.status = {"version": "old"}
    with pytest.raises(ChairliftError, match="cannot start: no"):
        start_fleet("a", CONFIG, OPTIONS)
    assert fake.running == {"a", "a-ingress"}


def test_an_ingress_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.cluster.serving.fleet import start_fleet

    fake = FakeServe(monkeypatch, "a", "a-ingress")
    with pytest.raises(ChairliftError, match="'a-ingress' does not answer"):
        start_fleet("a", CONFIG, OPTIONS)
    assert fake.started == ["a", "a-ingress"]


def test_new_keys_and_certificates_in_the_same_files_need_new_ingresses(tmp_path: Path) -> None:
    from chairlift.cluster.serving.fleet import ingress_version

    keys, certificate = tmp_path / "keys", tmp_path / "cert.pem"
    config = ServerConfig("tiny", keys=KeySources(file=keys), certificate=Certificate(certificate))
    versions = []
    for contents in (("alice one", "x"), ("alice one", "x"), ("alice two", "x"), ("alice two", "y")):
        for file, text in zip((keys, certificate), contents, strict=True):
            file.write_text(text)
        versions.append(ingress_version(config, OPTIONS))
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3


def test_the_status_of_a_fleet_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from chairlift.cli.cluster import cluster_app
    from chairlift.cluster.serving.fleet import fleet_status

    def application(**deployments: dict[str, int]) -> SimpleNamespace:
        deploying = SimpleNamespace(value="DEPLOYING")
        parts = {name: SimpleNamespace(status=deploying, replica_states=states) for name, states in deployments.items()}
        return SimpleNamespace(status=deploying, message="", deployments=parts)

    def no_handle(name: str, app: str) -> None:
        raise KeyError(f"Deployment(name={name!r}, app={app!r}) does not exist.")

    monkeypatch.setattr(serve, "get_deployment_handle", no_handle)
    monkeypatch.setattr("chairlift.cluster.ray_runtime.connect", lambda *_, **__: False)
    starting = {"a": application(replica={"STARTING": 2})}
    for ingress in ({}, {"a-ingress": application(ingress={"STARTING": 1})}):
        monkeypatch.setattr(serve, "status", lambda found=starting | ingress: SimpleNamespace(applications=found))
        found = fleet_status("a")
        assert (found["state"], found["address"], found["replicas"]) == ("deploying", None, [])
        assert found["deployments"]["replica"]["replicas"] == {"STARTING": 2}
        shown = CliRunner().invoke(cluster_app, ["status", "--name", "a"])
        assert shown.exit_code == 0, shown.output
        assert "a: deploying, no ingress is running" in shown.output
    with pytest.raises(ChairliftError, match="no fleet 'b'"):
        fleet_status("b")
