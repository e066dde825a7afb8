"""Performance figures of devices, for predictions without measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Device:
    """Sustained bandwidth and throughput, which are below the figures of the datasheet."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # dense, in the type the weights are computed in
    memory_bytes: float
    step_seconds: float  # fixed time of a step: kernel launches and waits
    host_bytes_per_second: float = 25e9  # to host memory or back, for swapping

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second", "memory_bytes", "host_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise InvalidParameter(name, f"must be above 0, got {getattr(self, name)}")
        if not self.step_seconds >= 0:
            raise InvalidParameter("step_seconds", f"must be at least 0, got {self.step_seconds}")


# h200: measured with `chairlift bench shapes`. cpu: two cores with AVX-512, measured. The others: their datasheets'
# bandwidth and bf16 rate, times the share that the h200 reaches of its own (0.90 and 0.80). To the host: about 80% of
# the PCIe bandwidth; on a CPU, a copy within memory.
DEVICES = {
    device.name: device
    for device in (
        Device("h200", 4.3e12, 788e12, 141e9, 0.7e-3, 50e9),
        Device("h100", 3.35e12 * 0.9, 989e12 * 0.8, 80e9, 0.7e-3, 50e9),
        Device("a100", 2.04e12 * 0.9, 312e12 * 0.8, 80e9, 0.9e-3),
        Device("l4", 0.3e12 * 0.9, 121e12 * 0.8, 24e9, 1.0e-3),
        Device("cpu", 14e9, 0.25e12, 16e9, 2e-3, 5e9),
    )
}


def device_named(name: str, **changes: float | None) -> Device:
    """Look up a device and replace the given figures; `custom` needs all of them."""
    given = {key: value for key, value in changes.items() if value is not None}
    if name == "custom":
        missing = [key for key in ("bytes_per_second", "flops_per_second", "memory_bytes") if key not in given]
        if missing:
            raise InvalidParameter("device", f"a custom device needs {', '.join(missing)}")
        return Device("custom", **({"step_seconds": 0.0} | given))
    if name not in DEVICES:
        raise InvalidParameter("device", f"unknown device {name!r}; choose from {', '.join(DEVICES)}, custom")
    return replace(DEVICES[name], **given)  # type: ignore[arg-type]
