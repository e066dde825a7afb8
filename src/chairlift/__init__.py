"""Chairlift: an LLM inference engine built around continuous batching.

>>> from chairlift import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chairlift.errors import (
    ChairliftError,
    CorruptCheckpoint,
    EngineDead,
    EngineDied,
    InvalidParameter,
    ModelNotFound,
    StorageFull,
    TemporaryFailure,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from chairlift.async_llm import AsyncLLM
    from chairlift.config import EngineConfig
    from chairlift.core.sampling.params import SamplingParams
    from chairlift.core.sampling.structure import Structure
    from chairlift.engine.engine import Engine
    from chairlift.llm import LLM
    from chairlift.lora import LoRARequest
    from chairlift.outputs import CompletionOutput, RequestOutput, StreamedText

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChairliftError",
    "CompletionOutput",
    "CorruptCheckpoint",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineDied",
    "InvalidParameter",
    "LoRARequest",
    "ModelNotFound",
    "RequestOutput",
    "SamplingParams",
    "StorageFull",
    "StreamedText",
    "Structure",
    "TemporaryFailure",
    "UnsupportedModel",
    "__version__",
]

# Imported on first use, so that `import chairlift` does not wait for torch.
_HOMES = {
    "LLM": "chairlift.llm",
    "AsyncLLM": "chairlift.async_llm",
    "LoRARequest": "chairlift.lora",
    "SamplingParams": "chairlift.core.sampling.params",
    "Structure": "chairlift.core.sampling.structure",
    "Engine": "chairlift.engine.engine",
    "EngineConfig": "chairlift.config",
    "RequestOutput": "chairlift.outputs",
    "CompletionOutput": "chairlift.outputs",
    "StreamedText": "chairlift.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
