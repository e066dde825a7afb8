"""Ray is optional, and its cluster may be missing."""

from __future__ import annotations

import sys

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
