"""What has to be measured on a GPU: the commands of each part, and the figures that are read from their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL, LARGE = "qwen3-0.6b", "llama3-8b"
DECODES = "decode-1,decode-32,decode-128"


@dataclass(frozen=True, slots=True)
class Command:
    """A bench of chairlift or a run of pytest, by the name under which its result is kept."""

    name: str
    arguments: tuple[str, ...]
    has_peer: bool = False  # it takes --peer and --peer-python
    is_tests: bool = False

    @property
    def bench(self) -> str:
        return self.arguments[0]


class Found:
    """The reports of the commands that have ended, as their JSON files have them."""

    def __init__(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        self._reports = reports

    def value(self, command: str, row: Mapping[str, Any] | str, key: str) -> float | None:
        """A number of the first row whose entries are those of `row`, or whose name it is."""
        wanted = {"name": row} if isinstance(row, str) else row
        for each in self._reports.get(command, {}).get("rows", ()):
            if all(each.get(name) == value for name, value in wanted.items()):
                return each.get(key)
        return None

    def rate(self, command: str, case: str) -> float | None:
        return self.value(command, case, "tokens_per_second")

    def times_peer(self, command: str, case: str) -> float | None:
        return self.value(command, case, "times_peer")

    def ratio(self, command: str, other: str, case: str) -> float | None:
        """The rate of one command over that of another."""
        rates = self.rate(command, case), self.rate(other, case)
        return None if rates[0] is None or not rates[1] else rates[0] / rates[1]

    def passed(self, command: str) -> float | None:
        return self._reports.get(command, {}).get("passed")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with the bound that is asked for."""

    name: str
    read: Callable[[Found], float | None]
    at_least: float | None = None
    at_most: float | None = None

    def is_reached(self, value: float) -> bool | None:
        if self.at_least is None and self.at_most is None:
            return None
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that fit into one call of less than ten minutes, and what is read from them."""

    title: str
    commands: tuple[Command, ...]
    figures: tuple[Figure, ...] = field(default=())


def shapes(name: str, shape: str, cases: str, *more: str, has_peer: bool = False) -> Command:
    return Command(name, ("shapes", shape, "--cases", cases, *more), has_peer)


def tests(name: str, *arguments: str) -> Command:
    return Command(name, arguments, is_tests=True)


def over_peer(command: str, bounds: Mapping[str, float | None]) -> Iterator[Figure]:
    for case, bound in bounds.items():
        yield Figure(f"{command}, {case}: times vLLM", lambda found, case=case: found.times_peer(command, case), bound)


def over_own(command: str, other: str, bounds: Mapping[str, float | None]) -> Iterator[Figure]:
    for case, bound in bounds.items():
        name = f"{command}, {case}: times {other}"
        yield Figure(name, lambda found, case=case: found.ratio(command, other, case), bound)


def rates(command: str, bounds: Mapping[str, float | None]) -> Iterator[Figure]:
    for case, bound in bounds.items():
        yield Figure(f"{command}, {case}: tokens/s", lambda found, case=case: found.rate(command, case), bound)


def cold_start(name: str, shape: str, *, seconds: int = 60) -> Part:
    cold, warm = ({"start": start} for start in ("cold", "warm"))
    ttft = [
        Figure(
            f"{streams} streams: TTFT p99 ms",
            lambda found, streams=streams: found.value(name, cold | {"streams": streams}, "ttft_p99_ms"),
            at_most=limit,
        )
        for streams, limit in ((1, 500), (8, 700), (32, 1000))
    ]
    starts = [
        Figure(
            f"{row['start']}: first token s",
            lambda found, row=row: found.value(name, row, "first_token_seconds"),
            at_most=limit,
        )
        for row, limit in ((cold, 12), (warm, 6))
    ]
    options = ("--model-config", shape, "--streams", "1,8,32", "--seconds", f"{seconds}")
    return Part(f"A cold start, {shape}", (Command(name, ("cold-start", *options)),), (*ttft, *starts))


def quality(*limits: tuple[str, float]) -> Part:
    figures = [
        Figure(
            f"{mode}: change of perplexity",
            lambda found, mode=mode: found.value("quality", mode, "perplexity_change"),
            at_most=limit,
        )
        for mode, limit in limits
    ]
    return Part("Perplexity of the default model", (Command("quality", ("quality",)),), tuple(figures))


STRESSES = {
    "fp8": ("--quantization", "fp8"),
    "fp8, KV fp8": ("--quantization", "fp8", "--kv-dtype", "fp8"),
    "int4": ("--quantization", "int4"),
}

PARTS: dict[str, Part] = {
    "fp8": Part(
        "8-bit floats, Llama-3-8B shape",
        (
            shapes("bf16", LARGE, f"{DECODES},load-256", "--quantization", "none"),
            shapes("fp8", LARGE, f"{DECODES},load-256", "--quantization", "fp8", has_peer=True),
            shapes("fp8 head", LARGE, f"{DECODES},load-256", "--quantization", "fp8", "--quantize-head"),
            shapes("fp8 KV", LARGE, f"{DECODES},load-256", "--quantization", "fp8", "--kv-dtype", "fp8"),
        ),
        (
            *rates("fp8", {"decode-1": 430}),
            *over_own("fp8", "bf16", {"decode-1": 1.7, "decode-32": None, "decode-128": None, "load-256": None}),
            *over_peer("fp8", {"decode-1": 1.5, "decode-32": 1.5, "decode-128": 1.5, "load-256": 1.4}),
            *over_own("fp8 head", "fp8", {"decode-1": None, "decode-128": None}),
            *over_own("fp8 KV", "fp8", {"decode-128": None, "load-256": 1.2}),
        ),
    ),
    "int4": Part(
        "4-bit weights, Llama-3-8B shape",
        (
            shapes("gptq", f"{LARGE}-gptq", f"{DECODES},load-256", has_peer=True),
            shapes("int4", LARGE, DECODES, "--quantization", "int4"),
            shapes("int4 head", LARGE, "decode-1", "--quantization", "int4", "--quantize-head"),
        ),
        (
            *rates("gptq", {"decode-1": 600}),
            *over_peer("gptq", {"decode-1": 1.2, "decode-32": None, "decode-128": None, "load-256": None}),
            *rates("int4", {"decode-1": None}),
            *rates("int4 head", {"decode-1": None}),
        ),
    ),
    "quality": quality(("bfloat16, KV fp8", 0.01), ("fp8", 0.01), ("int4", 0.06)),
    "cold": cold_start("cold", SMALL),
    "cold-8b": cold_start("cold-8b", LARGE),
    "ttft": Part(
        "A lone prompt of 220 tokens",
        (Command("latency", ("latency", "--model-config", SMALL, "--batch", "1", "--prompt-tokens", "220")),),
        (Figure("TTFT ms", lambda found: found.value("latency", {"batch": 1}, "ttft_ms"), at_most=12),),
    ),
    "invariant": Part(
        "--batch-invariant",
        (
            shapes("0.6b", SMALL, DECODES),
            shapes("0.6b invariant", SMALL, DECODES, "--batch-invariant"),
            shapes("8b", LARGE, DECODES),
            shapes("8b invariant", LARGE, DECODES, "--batch-invariant"),
            tests("bits", "tests/gpu/test_modes.py", "tests/gpu/test_kernels.py", "-k", "invariant"),
        ),
        (
            *over_own("0.6b invariant", "0.6b", dict.fromkeys(DECODES.split(","), 0.9)),
            *over_own("8b invariant", "8b", dict.fromkeys(DECODES.split(","), 0.9)),
            Figure("bit-identity tests passed", lambda found: found.passed("bits"), 1),
        ),
    ),
    "bf16": Part(
        "16 bits beside vLLM",
        (shapes("8b bf16", LARGE, "decode-128,load-256,prefill-64", "--quantization", "none", has_peer=True),),
        tuple(over_peer("8b bf16", {"decode-128": 1.2, "load-256": 1.12, "prefill-64": None})),
    ),
    "bf16-small": Part(
        "16 bits, Qwen3-0.6B shape: the figures of docs/gpu.md",
        (shapes("0.6b bf16", SMALL, f"{DECODES},load-256"),),
        # Two percent below 1,142, 27,793, 61,906 and 27,893: the last figures of one machine.
        tuple(rates("0.6b bf16", {"decode-1": 1119, "decode-32": 27237, "decode-128": 60668, "load-256": 27335})),
    ),
    "moe": Part(
        "A mixture of experts, Qwen3-30B-A3B shape",
        (
            shapes("moe", "qwen3-30b-a3b", f"{DECODES},load-256", has_peer=True),
            shapes("moe fp8", "qwen3-30b-a3b", f"{DECODES},load-256", "--quantization", "fp8"),
        ),
        (
            *over_peer("moe", {"decode-1": 1.15, "decode-32": None, "decode-128": None, "load-256": None}),
            *over_own("moe fp8", "moe", {"decode-1": None, "decode-32": None, "decode-128": None, "load-256": None}),
        ),
    ),
    "mla": Part(
        "Latent attention, DeepSeek-V2-Lite shape",
        (
            shapes("mla", "deepseek-v2-lite", f"{DECODES},load-256", has_peer=True),
            Command(
                "mla attention",
                (
                    *("kernels", "--model-config", "deepseek-v2-lite", "--kernels", "attention"),
                    *("--batch", "1,8,64", "--contexts", "1024,8192,65536"),
                ),
            ),
            tests("mla tests", "tests/gpu/test_latent.py"),
        ),
        (
            *over_peer("mla", {"decode-1": None, "decode-32": None, "decode-128": None, "load-256": None}),
            Figure("latent tests passed", lambda found: found.passed("mla tests"), 1),
        ),
    ),
    "hybrid": Part(
        "Recurrent layers, Granite-4-H-Tiny shape",
        (shapes("hybrid", "granite4-h-tiny", f"{DECODES},load-256", has_peer=True),),
        tuple(over_peer("hybrid", {"decode-1": None, "decode-32": None, "decode-128": None, "load-256": None})),
    ),
    "delta": Part(
        "Gated delta nets, half of the layers of Qwen3-Next-80B",
        (shapes("delta", "qwen3-next-80b", f"{DECODES},load-256", "--layers", "24", has_peer=True),),
        tuple(over_peer("delta", {"decode-1": 1.1, "decode-32": 1.1, "decode-128": 1.1, "load-256": 1.1})),
    ),
    "gpt-oss": Part(
        "Attention sinks and experts of 4 bits, gpt-oss-20b shape",
        (shapes("gpt-oss", "gpt-oss-20b", f"{DECODES},load-256", has_peer=True),),
        tuple(over_peer("gpt-oss", {"decode-1": 1.1, "decode-32": 1.1, "decode-128": 1.1, "load-256": 1.1})),
    ),
    "speculation": Part(
        "Drafts on the default model",
        (Command("speculation", ("speculation", "--proposers", "ngram,layers:8", "--batches", "1,4,16,64")),),
    ),
    "kernels": Part(
        "Every kernel against float64",
        (tests("kernels", "tests/kernels", "tests/runner", "tests/gpu/test_kernels.py", "-n", "12"),),
        (Figure("kernel tests passed", lambda found: found.passed("kernels"), 1),),
    ),
    "stress": Part(
        "Random traffic, every greedy token checked",
        tuple(
            Command(f"stress {name}", ("stress", "--dtype", "bfloat16", "--seconds", "60", *options))
            for name, options in STRESSES.items()
        ),
        tuple(
            Figure(
                f"{name}: greedy tokens checked",
                lambda found, name=name: found.value(f"stress {name}", "recompute", "checked"),
                1,
            )
            for name in STRESSES
        ),
    ),
}
