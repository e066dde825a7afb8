"""The connection to Ray, which is an optional dependency."""

from __future__ import annotations

import os
import re
from types import ModuleType

from chairlift.errors import ChairliftError

MIN_RAY = (2, 60)  # authenticates with a token, and does so for clusters that `ray.init` starts
_INSTALL = "pip install 'chairlift[ray]', or in a clone pip install -e '.[ray]'"
OBJECT_STORE_BYTES = 128 * 2**20  # requests and responses do not pass through Ray's object store


def import_ray() -> ModuleType:
    """Import Ray, or raise an error that names the extra."""
    try:
        import ray
    except ImportError:
        raise ChairliftError(f"this needs Ray: {_INSTALL}") from None
    if tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2]) < MIN_RAY:
        needed = ".".join(map(str, MIN_RAY))
        raise ChairliftError(f"this needs Ray {needed} or newer, not {ray.__version__}: {_INSTALL}")
    return ray  # type: ignore[no-any-return]


def connect(address: str | None = None, *, log_to_driver: bool = True) -> bool:
    """Connect to a Ray cluster, unless this process is connected; return whether one was started here.

    `address` is that of a cluster, "auto" for the one on this machine, or "local" for a new one. Without it, the
    environment variable RAY_ADDRESS counts, then a cluster that `ray start` started on this machine, and otherwise one
    is started, which ends with this process.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    options = {"address": address, "log_to_driver": log_to_driver, "configure_logging": False}
    try:
        ray.init(**options, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
        return True
    except ValueError:
        pass  # there is a cluster, and these options are only for a new one
    except ConnectionError as error:
        raise _no_cluster(address, error) from None
    try:
        ray.init(**options)
        return False
    except ConnectionError as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str | None, error: Exception) -> ChairliftError:
    wanted = "on this machine" if address == "auto" else f"at {address or os.environ.get('RAY_ADDRESS')}"
    return ChairliftError(f"there is no Ray cluster {wanted}: {error}")


def is_authenticated() -> bool:
    """Whether this process uses a token; Ray sets the variable too when it decides so."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    import_ray().shutdown()


def cluster_nodes() -> list[dict[str, float]]:
    """The resources of each machine of the cluster."""
    return [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
