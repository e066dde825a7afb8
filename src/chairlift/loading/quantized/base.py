"""What a checkpoint needs from the reader of its quantized weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight

WeightParts: TypeAlias = "Mapping[str, Tensor]"


class QuantizedReader(ABC):
    """Reads the weights of one quantization method.

    A checkpoint holds every quantized weight as several tensors, the parts. The names of a checkpoint's tensors say
    which weights are quantized; the reader says which parts belong together and what they mean.
    """

    name: ClassVar[str]

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the quantization_config of config.json. Raises UnsupportedModel for what cannot be read."""
        self.config = config

    @abstractmethod
    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The quantized weights among all tensors of a checkpoint: the tensor that holds each part of each weight."""

    @abstractmethod
    def read(self, weight: str, parts: WeightParts) -> StoredWeight:
        """Build the weight from its parts."""

    @abstractmethod
    def description(self) -> str:
        """What the checkpoint holds, for the startup report."""

    def refuse(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel(f"the checkpoint is quantized by {self.name}, but {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An entry of the config that must be an integer."""
        value = self.config.get(key, default)
        if type(value) is not int:
            raise self.refuse(f"its quantization_config has {key}={value!r:.60}, which is not an integer")
        return value


def by_suffix(names: Iterable[str], required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Group `module.suffix` names by module; modules without all required suffixes are not quantized."""
    required = tuple(required)
    suffixes = {*required, *optional}
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        if suffix in suffixes:
            modules.setdefault(module, {})[suffix] = name
    return {
        f"{module}.weight": parts for module, parts in modules.items() if all(suffix in parts for suffix in required)
    }
