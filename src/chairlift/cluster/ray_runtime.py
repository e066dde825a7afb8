"""The connection to Ray, which is an optional dependency."""

from __future__ import annotations

import os
from types import ModuleType

from chairlift.errors import ChairliftError

OBJECT_STORE_BYTES = 128 * 2**20  # requests and responses do not pass through Ray's object store
_AUTOMATIC = "auto"


def import_ray() -> ModuleType:
    """Import Ray, or raise an error that names the extra."""
    try:
        import ray
    except ImportError:
        raise ChairliftError("this needs Ray: pip install 'chairlift[ray]'") from None
    return ray  # type: ignore[no-any-return]


def connect(address: str | None = None, *, log_to_driver: bool = True) -> bool:
    """Connect to a Ray cluster, unless this process is connected; return whether it was started here.

    `address` is that of a cluster, "auto" for the one on this machine, or "local" for a new one. Without it, the
    environment variable RAY_ADDRESS counts, then a cluster on this machine, and otherwise one is started, which ends
    with this process.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS") or _AUTOMATIC
    options = {"log_to_driver": log_to_driver, "configure_logging": False}
    if wanted != "local":
        try:
            ray.init(address=wanted, **options)
            return False
        except ConnectionError as error:
            if address or os.environ.get("RAY_ADDRESS"):
                raise ChairliftError(f"there is no Ray cluster at {wanted}: {error}") from None
    ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)
    return True
