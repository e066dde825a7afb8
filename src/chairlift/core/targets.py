"""What a client expects of a request: the times to its first token, per token and to its end, and named classes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from chairlift.errors import InvalidParameter

NAMES = ("ttft", "tpot", "e2e")


class RequestTimes(Protocol):
    """The measured times of a request, in seconds."""

    @property
    def ttft(self) -> float: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def e2e(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; a request that meets all of them counts as good."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def of_milliseconds(cls, given: Mapping[str, Any], parameter: str = "targets") -> Targets:
        """Check {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 60000}, of which any may be left out."""
        if not isinstance(given, Mapping) or not given:
            raise InvalidParameter(parameter, f"must have ttft_ms, tpot_ms or e2e_ms, got {given!r:.60}")
        seconds: dict[str, float] = {}
        for name, value in given.items():
            if not isinstance(name, str) or name.removesuffix("_ms") not in NAMES or not name.endswith("_ms"):
                raise InvalidParameter(parameter, f"has ttft_ms, tpot_ms and e2e_ms, not {name!r:.40}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                raise InvalidParameter(parameter, f"{name} must be a number of milliseconds above 0, got {value!r:.40}")
            seconds[name.removesuffix("_ms")] = value / 1e3
        return cls(**seconds)

    def __str__(self) -> str:
        """As in a declaration of classes, in milliseconds: "ttft:500,tpot:50"."""
        limits = ((name, getattr(self, name)) for name in NAMES)
        return ",".join(f"{name}:{1e3 * limit:g}" for name, limit in limits if limit is not None)

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))

    def judge(self, times: RequestTimes) -> dict[str, bool]:
        """Whether each target is met, by its name; a time that is None keeps any."""
        limits = {name: limit for name in NAMES if (limit := getattr(self, name)) is not None}
        return {name: (value := getattr(times, name)) is None or value <= limit for name, limit in limits.items()}

    def met_by(self, times: RequestTimes) -> bool:
        pairs = ((times.ttft, self.ttft), (times.tpot, self.tpot), (times.e2e, self.e2e))
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Targets with a name, and the share of the traffic that has them (in a simulation)."""

    name: str
    targets: Targets
    share: float = field(default=1.0, compare=False)


def parse_classes(declared: Iterable[str]) -> dict[str, ServiceClass]:
    """Parse "interactive=ttft:500,tpot:50", in milliseconds; a simulation also takes a share, as in "…,share:2"."""
    classes: dict[str, ServiceClass] = {}
    for text in declared:
        name, _, rest = text.partition("=")
        pairs = [part.partition(":") for part in rest.split(",")]
        if not re.fullmatch(r"[\w-]{1,64}", name) or not all(key and value for key, _, value in pairs):
            raise InvalidParameter("classes", f"must look like interactive=ttft:500,tpot:50, got {text!r:.80}")
        try:
            values = {key: float(value) for key, _, value in pairs}
        except ValueError:
            raise InvalidParameter("classes", f"{name!r} must have numbers of milliseconds, got {rest!r:.80}") from None
        if name in classes or len(values) < len(pairs):
            raise InvalidParameter("classes", f"{name!r} contains the same name twice")
        share = values.pop("share", 1.0)
        if not (math.isfinite(share) and share > 0):
            raise InvalidParameter("classes", f"the share of {name!r} must be above 0, got {share!r}")
        targets = Targets.of_milliseconds({f"{key}_ms": value for key, value in values.items()}, "classes")
        classes[name] = ServiceClass(name, targets, share)
    return classes
