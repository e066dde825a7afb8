"""Measures the code as a reader meets it: sizes, imports, comments, seams, and the files that a request enters.

`python -m tests.house` prints the table; tests/test_house.py holds each number to a budget.
"""

from __future__ import annotations

import ast
import asyncio
import http.client
import inspect
import io
import json
import re
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
PREPOSITIONS = ["of", "for", "in", "on", "by", "with", "that", "which", "from", "at", "as", "than", "where", "per"]
MID_SENTENCE = re.compile(rf"#\s*({'|'.join(PREPOSITIONS)})\b")
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# Classes that implement a seam: code on the other side of it should never ask which of them it has.
SEAM_TYPES = {
    *("StepAttention", "PagedCPUStep", "PagedGPUStep"),
    *("PlainWeight", "PackedWeight", "BlockWeight", "FP8Weight", "StoredEmbedding"),
    *("SelfAttention", "LatentAttention", "MixtureOfExperts", "GatedMLP", "UngatedMLP", "BlockExperts"),
    *("RMSNorm", "LayerNorm"),
    *("DraftModelProposer", "HeadNetwork", "KeptStates", "RecentStates"),
}
SMALL_FILE = 40


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(SOURCE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The top-level package, or '' for a module at the top."""
        parts = self.path.relative_to(SOURCE).parts
        if parts[0] != "chairlift":
            return parts[0]
        return parts[1] if len(parts) > 2 else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def imports(self) -> frozenset[str]:
        """The modules of this project that it imports anywhere."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("chairlift"):
                names.add(str(node.module))
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name.startswith("chairlift")}
        return frozenset(names)

    @cached_property
    def num_import_lines(self) -> int:
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        return len({line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})

    @cached_property
    def num_code_lines(self) -> int:
        """Lines that are neither blank, nor comments, nor docstrings."""
        lines: set[int] = set()
        for token in self._tokens:
            if token.type not in LAYOUT_TOKENS and token.type != tokenize.COMMENT:
                lines.update(range(token.start[0], token.end[0] + 1))
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(self.tree):
            if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return len(lines)

    @cached_property
    def mid_sentence_comments(self) -> tuple[str, ...]:
        """Comments that begin with a preposition, except continuations of a comment in the line above."""
        found, above = [], -1
        for token in self._tokens:
            if token.type != tokenize.COMMENT:
                continue
            alone = not token.line[: token.start[1]].strip()
            if MID_SENTENCE.match(token.string) and not (alone and token.start[0] == above + 1):
                found.append(f"{self.path.relative_to(SOURCE)}:{token.start[0]}: {token.string}")
            if alone:
                above = token.start[0]
        return tuple(found)

    @cached_property
    def seam_questions(self) -> tuple[str, ...]:
        """Calls of isinstance that ask for an implementation of a seam."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                if names & SEAM_TYPES:
                    found.append(f"{self.path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
        return tuple(found)

    @property
    def _tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(io.StringIO(self.text).readline)


@cache
def modules() -> tuple[Module, ...]:
    return tuple(Module(path) for path in sorted(SOURCE.rglob("*.py")))


def lines_by_package() -> dict[str, int]:
    counts: Counter[str] = Counter()
    for module in modules():
        counts[module.package] += module.num_lines
    return dict(counts)


def import_share() -> float:
    return sum(each.num_import_lines for each in modules()) / sum(each.num_code_lines for each in modules())


def fan_out() -> dict[str, int]:
    """How many modules of this project each module imports."""
    return {module.name: len(module.imports) for module in modules()}


def members(module: str, name: str) -> list[str]:
    """The public methods, properties and attributes that a class declares."""
    tree = next(each.tree for each in modules() if each.name == module)
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return sorted(each for each in found if not each.startswith("_"))


def interfaces() -> dict[str, int]:
    """The number of public members of every protocol and abstract class."""
    found = {}
    for module in modules():
        for node in module.tree.body:
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base == "ABC" or base.startswith("Protocol") for base in bases):
                assert isinstance(node, ast.ClassDef)
                found[f"{module.name}:{node.name}"] = len(members(module.name, node.name))
    return found


def _is_property(frame: FrameType) -> bool:
    owner = type(frame.f_locals.get("self"))
    return isinstance(inspect.getattr_static(owner, frame.f_code.co_name, None), property)


@dataclass
class Trace:
    """The source files that one thread or several enter, in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)  # (file, file of the caller)
    active: bool = False
    _frames: list[FrameType] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not self.active:
            return
        file = frame.f_code.co_filename
        if "/chairlift" not in file or not file.startswith(str(SOURCE)) or id(frame) in self._seen:
            return
        self._seen.add(id(frame))  # A coroutine that resumes is not entered again.
        self._frames.append(frame)  # The frame is kept, so that no other frame has its id.
        # Reading a property of a value does not count as an entry into its file.
        self.calls.append((file, file if _is_property(frame) else self._caller(frame)))

    @staticmethod
    def _caller(frame: FrameType) -> str:
        """Return the file of this project that called, perhaps through a library such as contextlib."""
        above = frame.f_back
        while above is not None and not above.f_code.co_filename.startswith(str(SOURCE)):
            above = above.f_back
        return "" if above is None else above.f_code.co_filename

    def files(self) -> list[str]:
        return sorted({str(Path(file).relative_to(SOURCE)) for file, _ in self.calls})

    def entries(self) -> Counter[str]:
        """How often each file was entered from another file."""
        return Counter(str(Path(file).relative_to(SOURCE)) for file, caller in self.calls if file != caller)


@dataclass(frozen=True)
class RequestTrace:
    """What one chat request enters in the front end before it reaches the engine, and after."""

    inward: Trace
    outward: Trace


def trace_request() -> RequestTrace:
    """Trace one streaming chat request through the front end. A request before it on the same connection, which clients
    keep open, imports what is imported late."""
    from tests.server.front_end import front_end

    inward, outward = Trace(), Trace()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        (outward if outward.active else inward).profile(frame, event, arg)

    threading.setprofile(profile)
    try:
        with front_end() as running:
            receive, connection = running.engine._send, http.client.HTTPConnection("127.0.0.1", running.port)

            def submit(message: bytes) -> None:
                inward.active, active = False, inward.active  # What follows is the engine's: it decodes the message.
                receive(message)
                outward.active = outward.active or active

            running.engine._send = submit  # type: ignore[method-assign]
            post_chat(connection)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), running.engine.loop).result()  # Its end is handled.
            inward.active = True
            post_chat(connection)
            outward.active = False
            connection.close()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return RequestTrace(inward, outward)


def post_chat(connection: http.client.HTTPConnection) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    assert b"[DONE]" in connection.getresponse().read()


def trace_step() -> Trace:
    """Trace one step of four decodes on a CPU."""
    import tempfile

    from chairlift import LLM, SamplingParams
    from tests.tiny import write_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_tiny_checkpoint(Path(folder) / "tiny")), device="cpu", dtype="float32")
        engine = llm.engine
        for number in range(4):
            engine.submit([1, 2, number], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        for _ in range(3):
            engine.step()
        trace = Trace(active=True)
        sys.setprofile(trace.profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return trace


def table() -> list[tuple[str, Any]]:
    """The rows of the report, in order."""
    every, lab = modules(), [each for each in modules() if each.package in ("lab", "chairlift_lab")]
    request, fans = trace_request(), fan_out()
    entries = request.inward.entries()
    return [
        ("source lines", sum(each.num_lines for each in every)),
        ("source files", len(every)),
        ("product lines", sum(each.num_lines for each in every) - sum(each.num_lines for each in lab)),
        ("laboratory lines", sum(each.num_lines for each in lab)),
        (f"files under {SMALL_FILE} lines", sum(each.num_lines < SMALL_FILE for each in every)),
        ("share of code lines that are imports", f"{import_share():.1%}"),
        ("comments that begin in mid-sentence", sum(len(each.mid_sentence_comments) for each in every)),
        ("isinstance on seam types", sum(len(each.seam_questions) for each in every)),
        ("members of WeightFormat", len(members("chairlift.layers.formats.base", "WeightFormat"))),
        ("imports of engine.startup", fans["chairlift.engine.startup"]),
        ("imports of the GPU runner", fans["chairlift.runner.gpu.runner"]),
        ("modules with more than 20 imports", sum(count > 20 for count in fans.values())),
        ("lines of models/decoder.py", next(e.num_lines for e in every if e.name == "chairlift.models.decoder")),
        ("files a chat request enters before the engine", len(request.inward.files())),
        ("files entered more than once on that way", sum(count > 1 for count in entries.values())),
        ("files a chat request enters after the engine", len(request.outward.files())),
        ("files a step on a CPU enters", len(trace_step().files())),
    ]


if __name__ == "__main__":
    for name, value in table():
        print(f"{name:50} {value}")
    if "--details" in sys.argv:
        request = trace_request()
        for title, trace in (("inward", request.inward), ("outward", request.outward), ("step", trace_step())):
            print(f"\n{title}:")
            for file, count in trace.entries().most_common():
                print(f"  {count:3} {file}")
