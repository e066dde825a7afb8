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
