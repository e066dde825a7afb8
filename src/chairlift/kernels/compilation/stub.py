"""A stand-in for the CUDA driver's library, against which launchers are linked where there is no GPU."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton.backends.nvidia import driver


@contextmanager
def libcuda_stub() -> Iterator[str]:
    """A folder with an empty libcuda.so.1, or "" if the driver's own library is here."""
    try:
        driver.libcuda_dirs()
    except AssertionError:
        pass
    else:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="chairlift-") as folder:
        source = Path(folder) / "empty.c"
        source.touch()
        library = Path(folder) / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
        yield folder
