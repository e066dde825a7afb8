"""The sampling parameters that the makers of a model recommend."""

from __future__ import annotations

from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.known_models import known_models
from chairlift.loading.resolve import resolve_model

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended_sampling(model: str) -> dict[str, float]:
    """Return them by name, from the list of known models or from generation_config.json; empty if there are none."""
    for known in known_models():
        if known.name == model:
            return dict(known.sampling)
    settings = open_checkpoint(resolve_model(model)).generation_config
    if settings.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: settings.get(name) for name in _NAMES}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}
