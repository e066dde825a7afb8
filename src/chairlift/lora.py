"""vLLM's way to name an adapter in the offline API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.engine.adapters import EngineAdapters


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter with its path, as vLLM has it; it is registered when it is first used.

    >>> llm = LLM("smollm2-135m", max_loras=4)
    >>> llm.generate("Hello", lora=LoRARequest("poet", 1, "adapters/poet"))
    """

    lora_name: str
    lora_int_id: int = 0  # vLLM tells adapters apart by it, Chairlift by their names
    lora_path: str = ""

    def register(self, adapters: EngineAdapters) -> None:
        known = {adapter.name: adapter.path for adapter in adapters.pool.registered}
        if self.lora_path and known.get(self.lora_name) != self.lora_path:
            adapters.load(self.lora_name, self.lora_path)


def lora_of_each(lora: Any, count: int) -> Sequence[Any]:
    """The adapter of each of `count` prompts: one for all, or a list of as many, with None for the base model."""
    if not isinstance(lora, (list, tuple)):
        return [lora] * count
    if len(lora) != count:
        raise InvalidParameter("lora", f"{len(lora)} given for {count} prompts; give one or as many")
    return list(lora)
