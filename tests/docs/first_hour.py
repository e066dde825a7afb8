"""Record the first hour on a clean machine: `python -m tests.docs.first_hour docs/first-hour.md`.

Every command runs in a fresh clone with a home of its own, so that nothing is cached; the page shows what it printed
and how long it took. The machine must be quiet.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from tests.docs.blocks import ROOT

QUESTION = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 200}'
ASK = f"curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{QUESTION}'"
PROGRAM = """from chairlift import LLM

llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)
"""
TRIES = 10
MOST_LINES = 24
INTRODUCTION = """# The first hour, recorded

What a newcomer types, what it prints and how long it takes: a fresh clone, a home without any cache, 2 CPU cores.
`python -m tests.docs.first_hour docs/first-hour.md` records this page ({commit}). Long outputs are cut at `…`.
"""


@dataclass
class Transcript:
    """Runs commands one after the other and keeps what they print."""

    folder: Path
    home: Path
    parts: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG", "HTTP"))}
        own = {
            "HOME": str(self.home),
            "PATH": f"{self.folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
            "COLUMNS": "100",
        }
        return {**kept, **own}

    def title(self, text: str) -> None:
        self.parts.append(f"## {text}")

    def run(self, command: str, *, lines: int = MOST_LINES, stdin: str = "") -> str:
        """Run a command to its end and record it; raises if it fails."""
        begin = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, input=stdin, text=True, capture_output=True
        )
        if done.returncode:
            raise SystemExit(f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.record(command, done.stderr + done.stdout, time.monotonic() - begin, lines=lines)
        return done.stdout

    def record(self, command: str, output: str, seconds: float, *, lines: int = MOST_LINES) -> None:
        shown = [line.rstrip()[:200] for line in output.replace(str(self.folder), "chairlift").splitlines()]
        shown = [line.replace(str(self.home), "~") for line in shown if line]
        if len(shown) > lines:
            shown = [*shown[: lines // 2], "…", *shown[-(lines - lines // 2) :]]
        self.parts.append("\n".join([f"{seconds:.1f} s", "", "```console", f"$ {command}", *shown, "```"]))


def record(folder: Path, home: Path) -> Transcript:
    transcript = Transcript(folder, home)
    transcript.title("Install")
    transcript.run("make install")
    transcript.title("Ask")
    transcript.run('chairlift run smollm2-135m "Why is the sky blue?"')
    transcript.run('chairlift run smollm2-135m "Name three colours."')
    transcript.title("Serve")
    serve(transcript)
    transcript.title("Python")
    (folder / "ask.py").write_text(PROGRAM)
    transcript.run("python ask.py")
    transcript.title("Choose a model")
    transcript.run("chairlift models")
    transcript.run("chairlift models --check qwen3-4b --memory 8GB")
    return transcript


def serve(transcript: Transcript) -> None:
    """Serve, send the README's request ten times, look at what runs, and stop."""
    begin, log = time.monotonic(), transcript.home / "server.log"
    with log.open("w") as output:
        command = ["chairlift", "serve", "smollm2-135m"]
        environment = transcript.environment
        program = str(transcript.folder / ".venv/bin/chairlift")
        server = subprocess.Popen(
            [program, *command[1:]], cwd=transcript.folder, env=environment, stdout=output, stderr=output
        )
    try:
        while "curl" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        transcript.record(" ".join(command), log.read_text(), time.monotonic() - begin)
        for number in range(TRIES):
            answer = transcript.run(ASK)
            content = re.search(r'"content":"(.*?)"[,}]', answer)
            if content is None or not {"sky", "light"} & set(content[1].split()):
                raise SystemExit(f"try {number + 1} of {TRIES} is not an answer: {answer}")
        transcript.run("chairlift ps")
        with urlopen("http://127.0.0.1:8000/dashboard", timeout=10) as page:
            assert b"dashboard" in page.read().lower()
        transcript.run("chairlift stop")
        server.wait(30)
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)


def main() -> None:
    (target,) = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder, home = Path(name) / "chairlift", Path(name) / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        commit = subprocess.run(
            ["git", "log", "-1", "--format=commit %h, %cs"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        transcript = record(folder, home)
    target.write_text("\n\n".join([INTRODUCTION.format(commit=commit).strip(), *transcript.parts]) + "\n")


if __name__ == "__main__":
    main()
