"""Draws docs/images/speed.png from the recorded results: `python -m chairlift_lab.report.speed_picture docs`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from chairlift_lab.report.options import Plot, save_panels

SHAPES = {"Qwen3-0.6B": "gpu-h200-peer.json", "Llama-3-8B": "gpu-h200-peer-8b.json"}
CASES = {"decode-1": "1", "decode-8": "8", "decode-32": "32", "decode-128": "128", "load-256": "256\nmixed"}
CPU_SECTION = "The 135M model beside OpenVINO and llama.cpp"
BLUE, LIGHT, GREY, DARK = "tab:blue", "#8fb8de", "#9aa0a6", "#5f6368"


def gpu_rows(results: Path) -> list[dict[str, Any]]:
    """How many times as fast as vLLM each shape was, by the number of requests."""
    return [
        {"requests": CASES[row["name"]], "shape": shape, "times": row["times_peer"]}
        for shape, file in SHAPES.items()
        for row in json.loads((results / file).read_text(encoding="utf-8"))["rows"]
        if row["name"] in CASES
    ]


def cpu_rows(results: Path) -> list[dict[str, Any]]:
    """Output tokens per second of each engine on two cores, by the number of requests."""
    sections = json.loads((results / "cpu.json").read_text(encoding="utf-8"))["sections"]
    table = next(section for section in sections if section["title"] == CPU_SECTION)["tables"][0]
    engines = table["columns"][1:]
    return [
        {"requests": row[0], "engine": engine, "rate": float(rate)}
        for row in table["rows"]
        for engine, rate in zip(engines, row[1:], strict=True)
        if rate
    ]


def draw(docs: Path) -> None:
    """Draw both panels."""
    results = docs / "results"
    on_gpu = Plot(
        title="One H200, bfloat16: times as fast as vLLM 0.26",
        rows=gpu_rows(results),
        x="requests",
        y="times",
        series="shape",
        level=1.0,
        form="%.2f",
        x_label="requests at once",
        y_label="times the output tokens/s of vLLM",
        colours=(BLUE, LIGHT),
    )
    on_cpu = Plot(
        title="2 CPU cores, SmolLM2-135M",
        rows=cpu_rows(results),
        x="requests",
        y="rate",
        series="engine",
        form="%g",
        x_label="requests at once",
        y_label="output tokens/s",
        colours=(BLUE, GREY, DARK),
    )
    note = "GPU: random weights. CPU: llama.cpp was run with 1 request. Commands and all figures: docs/speed.md"
    save_panels(docs / "images" / "speed.png", "Output tokens per second beside other engines", note, [on_gpu, on_cpu])


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
