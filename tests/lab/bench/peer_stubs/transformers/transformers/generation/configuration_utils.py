from __future__ import annotations

from types import SimpleNamespace


class ContinuousBatchingConfig(SimpleNamespace):
    pass
