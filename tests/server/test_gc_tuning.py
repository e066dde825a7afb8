"""Garbage collection while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from chairlift.server.process.this_process import collection_paused


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_nothing_is_collected_while_modules_are_imported() -> None:
    frozen = gc.get_freeze_count()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_collection_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()
