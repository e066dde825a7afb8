"""Options that do not go with recurrent layers."""

from __future__ import annotations

from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.models.base import CausalLM


def check_recurrent_options(config: EngineConfig, model: CausalLM) -> None:
    """Raise InvalidParameter for an option that cannot work with the recurrent layers of a model, or needs some."""
    if not model.recurrent_layers:
        if config.state_memory is not None:
            raise InvalidParameter("state_memory", "the model has no recurrent layers")
        return
    if config.preemption == "swap" or config.swap_memory is not None:
        name = "preemption" if config.preemption == "swap" else "swap_memory"
        problem = "the model has recurrent layers, whose states are not swapped to host memory"
        raise InvalidParameter(name, f"{problem}; preempted requests are recomputed (preemption recompute)")
    if config.speculate is not None and config.speculate.startswith("layers:"):
        problem = "the model has recurrent layers, whose states a draft would have to read and write"
        raise InvalidParameter("speculate", f"{problem}; use ngram or draft:PATH")
    if config.batch_invariant and model.device.type == "cuda":
        problem = "the model has recurrent layers, whose results on a GPU depend on how a prompt is cut into steps"
        raise InvalidParameter("batch_invariant", problem)
