"""Compiled kernels are kept in a folder that can be chosen, and are not read from one that others can change."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numba
import pytest

from chairlift.kernels.cpu import compiling

KERNEL = """
from chairlift.kernels.cpu.compiling import compiled_and_kept

@compiled_and_kept()
def double(number):
    return number * 2
"""


class Planted:
    """A pickle that runs code when it is read."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._trace,)


class Starts:
    """Loads the module of a kernel anew, as processes with these variables would."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._file, self._patch = folder / "kernel.py", patch
        self._file.write_text(KERNEL)

    def uses_cache(self, *, numba_cache: Path | None = None, cache: str = "") -> bool:
        """Run the kernel, and return whether its machine code was read from a cache."""
        self._patch.setattr(numba.config, "CACHE_DIR", "" if numba_cache is None else str(numba_cache))
        self._patch.setenv("CHAIRLIFT_CACHE", cache)
        self._patch.setattr(compiling.compilation, "has_begun", False)
        compiling.folder.cache_clear()
        spec = spec_from_file_location("kernel", self._file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.double(3) == 6
        return sum(module.double.stats.cache_hits.values()) == 1


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Starts]:
    """Starts of a user whose home cannot be written."""
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with caplog.at_level(logging.INFO, "chairlift"):
        yield Starts(tmp_path, monkeypatch)
    compiling.folder.cache_clear()


def test_the_folder_is_chosen_and_the_first_start_says_what_takes_long(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kernels"
    assert not starts.uses_cache(numba_cache=folder)
    assert f"kernels    compiling them for this CPU, kept for later starts in {folder}" in caplog.text
    caplog.clear()
    assert starts.uses_cache(numba_cache=folder)
    assert not caplog.text
    assert not starts.uses_cache()
    assert "compiled kernels are not kept: " in caplog.text
    assert "kernels    compiling them for this CPU, not kept for later starts" in caplog.text
    cache = str(tmp_path / "all")
    assert [starts.uses_cache(cache=cache) for _ in range(2)] == [False, True]
    assert list((tmp_path / "all" / "kernels").rglob("*.nbi"))


def test_planted_code_does_not_run(starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, trace = tmp_path / "cache" / "kernels", tmp_path / "trace"
    folder.parent.mkdir()
    assert not starts.uses_cache(numba_cache=folder)
    (version,), (index,) = folder.iterdir(), folder.rglob("*.nbi")
    version.chmod(0o755)
    index.write_bytes(pickle.dumps(Planted(trace)))
    for opened in (index, index.parent, version, folder, folder.parent):
        before = opened.stat().st_mode
        opened.chmod(0o777)
        assert not starts.uses_cache(numba_cache=folder)
        assert not trace.exists()
        assert f"{opened} can be written by other users: each start compiles them again" in caplog.text
        opened.chmod(before)
    assert not starts.uses_cache(numba_cache=folder)
    assert trace.exists()  # so it would have run
