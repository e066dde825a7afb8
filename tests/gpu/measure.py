"""`python -m tests.gpu.measure --part fp8 --peer-python vllm/bin/python --out results`: measure what docs/gpu.md names.

Every part takes less than ten minutes on an H200. Its figures are printed as a table beside the bounds that are asked
for; OUT/PART.json has them with the reports of all commands, so that a part that was interrupted can be continued:
commands whose reports are there are not run again. `--dry` runs tiny forms of all commands on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.measurements import PARTS, Command, Figure, Found
from tests.kernels.tiny_config import CONFIG

LIMIT = 570  # seconds of a part
# Options that a CPU does not have, with the number of their values.
ONLY_GPU = {"--quantize-head": 0, "--kv-dtype": 1, "--quantization": 1}
DRY: dict[str, tuple[str, ...]] = {
    "shapes": ("--cases", "decode-1,decode-2", "--scale", "64", "--slots", "4", "--layers", "1"),
    "cold-start": ("--streams", "1", "--seconds", "1", "--prompt-len", "8", "--output-len", "4"),
    "latency": ("--prompt-tokens", "8", "--output-tokens", "2", "--repeat", "1"),
    "kernels": ("--kernels", "products", "--rows", "1"),
    "stress": ("--dtype", "float32", "--seconds", "0.5"),
    "quality": ("--modes", "float32"),
    "speculation": (
        "--proposers",
        "ngram",
        "--scenarios",
        "quotes",
        "--batches",
        "1",
        "--tokens",
        "4",
        "--rounds",
        "1",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times; default: all")
    parser.add_argument("--peer-python", type=Path, help="the Python that has vLLM; without it, vLLM is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="the folder of the results")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each part")
    parser.add_argument("--dry", action="store_true", help="tiny forms of all commands on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return max(run_part(name, options) for name in options.part or PARTS)


def run_part(name: str, options: argparse.Namespace) -> int:
    """Run what is missing of a part, print its figures, and return the exit status."""
    part, begun = PARTS[name], time.monotonic()
    file: Path = options.out / f"{name}.json"
    reports: dict[str, Any] = json.loads(file.read_text())["reports"] if file.exists() else {}
    problems: dict[str, str] = {}
    print(f"\n{name}: {part.title}", flush=True)
    for command in part.commands:
        left = options.limit - (time.monotonic() - begun)
        if command.name in reports:
            continue
        if left <= 0:
            problems[command.name] = "no time left: call again to continue"
            continue
        try:
            reports[command.name] = run(command, options, left)
        except CommandFailed as failure:
            problems[command.name] = str(failure)
        rows = table(part.figures, Found(reports))
        file.write_text(json.dumps({"part": name, "figures": rows, "problems": problems, "reports": reports}, indent=1))
    for row in table(part.figures, Found(reports)):
        print(line(row), flush=True)
    for command_name, problem in problems.items():
        print(f"  {command_name}: {problem}", flush=True)
    return 1 if problems else 0


class CommandFailed(Exception):
    pass


def run(command: Command, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a command and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        line = command_line(command, options, report)
        print(f"  {' '.join(line[1:])}", flush=True)
        begun = time.monotonic()
        try:
            ended = subprocess.run(line, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"took longer than {seconds:.0f} s") from None
        lines = (ended.stdout + ended.stderr).strip().splitlines()
        print("\n".join(f"    {each}" for each in ended.stdout.rstrip().splitlines()[-30:]), flush=True)
        took = {"seconds": time.monotonic() - begun}
        if command.is_tests:
            if ended.returncode not in (0, 5) or (ended.returncode == 5 and not options.dry):  # 5: none were selected
                raise CommandFailed(f"status {ended.returncode}: {' | '.join(lines[-3:])}")
            return took | {"passed": 1, "summary": lines[-1] if lines else ""}
        if not report.exists():
            raise CommandFailed(f"status {ended.returncode}: {' | '.join(lines[-3:])}")
        failed = {} if ended.returncode == 0 else {"failure": lines[-1:]}  # for instance of the peer alone
        return json.loads(report.read_text()) | took | failed


def command_line(command: Command, options: argparse.Namespace, report: Path) -> list[str]:
    if command.is_tests:
        more = ["--collect-only", "-n", "0"] if options.dry else []
        return [sys.executable, "-m", "pytest", "-q", *command.arguments, *more]
    arguments = list(command.arguments)
    if options.dry:
        arguments = dry_arguments(command, report.parent)
    else:
        arguments += ["--device", "cuda"]
    if command.has_peer and options.peer_python is not None:
        arguments += ["--peer", "vllm", "--peer-python", str(options.peer_python)]
    return [sys.executable, "-m", "chairlift", "bench", *arguments, "--json", str(report)]


def dry_arguments(command: Command, folder: Path) -> list[str]:
    """A tiny form of a command for a CPU: the last of several values of an option counts."""
    tiny = folder / "config.json"
    tiny.write_text(json.dumps(CONFIG | {"vocab_size": 1024}))  # more than the prompts of bench cold-start use
    arguments, rest = [], list(command.arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ONLY_GPU:
            del rest[: ONLY_GPU[argument]]
        elif argument == "--model-config":
            rest[0] = str(tiny)
            arguments.append(argument)
        else:
            arguments.append(argument)
    if command.bench == "shapes":
        arguments[1] = str(tiny)
    return [*arguments, "--device", "cpu", *DRY[command.bench]]


def table(figures: Sequence[Figure], found: Found) -> list[dict[str, Any]]:
    rows = []
    for figure in figures:
        value = figure.read(found)
        reached = None if value is None else figure.is_reached(value)
        rows.append(
            {
                "figure": figure.name,
                "value": value,
                "at_least": figure.at_least,
                "at_most": figure.at_most,
                "reached": reached,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    value = "not measured" if row["value"] is None else f"{row['value']:,.3f}"
    bound = "" if row["at_least"] is None else f"at least {row['at_least']:,g}"
    bound += "" if row["at_most"] is None else f"at most {row['at_most']:,g}"
    mark = {None: "", True: "yes", False: "NO"}[row["reached"]]
    return f"  {row['figure']:<48} {value:>14}  {bound:<16} {mark}"


if __name__ == "__main__":
    sys.exit(main())
