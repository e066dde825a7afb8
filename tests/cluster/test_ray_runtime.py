"""Ray is optional, and its cluster may be missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from chairlift.cluster.ray_runtime import connect
from chairlift.errors import ChairliftError


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ChairliftError, match=r"pip install 'chairlift\[ray\]'"):
        connect()


def test_without_a_cluster_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")

    def find_nothing(**_: object) -> None:
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", find_nothing)
    with pytest.raises(ChairliftError, match="there is no Ray cluster on this machine"):
        connect("auto")


def test_a_ray_without_token_authentication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_refused in (("2.51.2", True), ("2.59.0", True), ("2.60.0", False), ("3.0.0.dev0", False)):
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version, is_initialized=lambda: True))
        if is_refused:
            with pytest.raises(ChairliftError, match=f"needs Ray 2.60 or newer, not {version}"):
                connect()
        else:
            assert not connect()


@pytest.mark.parametrize("mode", ["token", "disabled", None])
def test_a_cluster_without_authentication_is_named(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
    from typer.testing import CliRunner

    from chairlift.cli.cluster import cluster_app

    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("chairlift.cluster.ray_runtime.connect", lambda *_, **__: False)
    monkeypatch.setattr("chairlift.cluster.serving.fleet.start_fleet", lambda *_: "http://127.0.0.1:8000")
    shown = CliRunner().invoke(cluster_app, ["serve", "tiny", "--detach"])
    assert shown.exit_code == 0, shown.output
    assert ("has no authentication" in shown.output) == (mode != "token")
