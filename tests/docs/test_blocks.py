"""Every code block of the documentation is parsed: commands, programs, bodies of requests and configuration."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift.errors import ChairliftError
from chairlift.options import options_of, read_config_file
from chairlift.server.ollama.types import OllamaChatRequest
from chairlift.server.openai.types import ChatRequest, CompletionRequest
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions
from tests.docs.blocks import (
    PAGES,
    ROOT,
    Block,
    Command,
    all_flags,
    blocks,
    check_chairlift,
    commands,
    inline_code,
    is_path,
    of_language,
    shell_text,
)
from tests.tiny import write_tiny_checkpoint
from tests.tools import require_tool

LANGUAGES = {"bash", "console", "python", "json", "yaml", "toml", "js", "text", "nft"}
# Programs of others, whose options are not checked.
OTHERS = {
    *("aiperf", "cd", "claude", "docker", "export", "git", "guidellm", "helm", "install", "kill", "kubectl", "lm_eval"),
    *("npm", "ollama", "openssl", "optimum-cli", "ray", "serve", "sh", "smg", "source", "systemctl", "useradd"),
    *("cat", "chmod", "llama-gguf-split", "llm", "nvidia-smi", "ulimit", "umask"),
}
BODIES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/api/chat": OllamaChatRequest}
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMAND_LIKE = re.compile(r"^\$? ?(chairlift|make|curl|pip|python3?|docker) ", re.MULTILINE)


def test_every_block_names_its_language() -> None:
    assert [(str(block), block.language) for block in blocks() if block.language not in LANGUAGES] == []


def test_no_command_hides_in_a_block_of_text() -> None:
    assert [str(block) for block in of_language("text") if COMMAND_LIKE.search(block.text)] == []


@pytest.mark.parametrize("block", of_language("bash", "console"), ids=str)
def test_commands_are_those_of_the_programs(block: Block) -> None:
    text = shell_text(block)
    assert text.strip()
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for command in commands(text):
        check(command, block)


def check(command: Command, block: Block) -> None:
    words = list(command.words)
    program = Path(words[0]).name
    if program == "chairlift":
        try:
            check_chairlift(words[1:], names_only="CHAIRLIFT_PLUGINS" in command.variables)
        except ChairliftError as error:
            raise AssertionError(f"{' '.join(words)}: {error}") from None
    elif program == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert [target for target in targets if f"\n{target}:" not in MAKEFILE] == []
    elif program in ("python", "python3"):
        check_python(words[1:])
    elif program == "pytest":
        check_tests(words[1:])
    elif program == "curl":
        check_curl(words[1:])
    elif program == "pip":
        check_extras(words[1:])
    else:
        assert program in OTHERS, words
    for word in words:  # Files of the repository that any program is given.
        if word.startswith(("deploy/", "examples/")):
            assert (ROOT / word).exists(), word


def check_python(words: list[str]) -> None:
    if words[:1] != ["-m"]:
        assert not words or words[0].startswith("-") or (ROOT / words[0]).exists(), words
    elif words[1] == "pytest":
        check_tests(words[2:])
    elif words[1] == "pip":
        check_extras(words[2:])
    elif words[1] not in ("build", "venv"):
        assert find_spec(words[1]), words


def check_tests(words: list[str]) -> None:
    assert [word for word in words if word.startswith("tests") and not (ROOT / word).exists()] == []


def check_extras(words: list[str]) -> None:
    known = PYPROJECT["project"]["optional-dependencies"]
    for word in words:
        for names in re.findall(r"^(?:\.|chairlift\S*)\[([\w,-]+)\]", word):
            assert [name for name in names.split(",") if name not in known] == [], word
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).exists()


def check_curl(words: list[str]) -> None:
    address = next(word for word in words if re.match(r"(https?://)?(localhost|127\.0\.0\.1|HOST|server)\b", word))
    path = re.sub(r"^(https?://)?[^/]*", "", address).partition("?")[0]
    assert is_path(path or "/"), path
    for flag in ("-d", "--data", "--json"):
        if flag in words and not (data := words[words.index(flag) + 1]).startswith("@"):
            body = json.loads(data)
            if path in BODIES and block_without_plugins(body):
                BODIES[path].model_validate(body)


def block_without_plugins(body: dict[str, Any]) -> bool:
    return "no_repeat_ngram_size" not in body  # the parameter that a page of docs/extending adds


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_programs_use_what_exists(block: Block) -> None:
    """They compile, what they import exists, and calls of what they import have keywords that it takes."""
    tree = ast.parse(block.text, str(block))
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if available(alias.name):
                    names[alias.asname or alias.name] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and available(node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := resolve(node.func, names)) is not None:
            check_keywords(called, node)


def available(module: str) -> bool:
    """Whether a module can be imported; those of the project must be, others are clients and may be absent."""
    top = module.partition(".")[0]
    return top in ("chairlift", "chairlift_lab") or (top in sys.stdlib_module_names and find_spec(top) is not None)


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


def check_keywords(called: Any, node: ast.Call) -> None:
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
        return
    signature.bind(*node.args, **{str(keyword.arg): None for keyword in node.keywords})


RUN = ("README.md", "docs/run.md", "docs/python.md")


def test_programs_of_the_first_pages_run(tmp_path: Path) -> None:
    """They are complete: each runs as it is, on a tiny random model."""
    model = write_tiny_checkpoint(tmp_path / "tiny", positions=1024)
    programs = [block for block in of_language("python") if str(block.page.relative_to(ROOT)) in RUN]
    assert len(programs) >= 5
    text = "\n".join(f"print('--- {block}')\n{block.text}" for block in programs)
    (tmp_path / "programs.py").write_text(text.replace('"smollm2-135m"', repr(str(model))))
    command = [sys.executable, str(tmp_path / "programs.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"--- {block}" in done.stdout for block in programs)


@pytest.mark.slow
def test_programs_have_the_right_types(tmp_path: Path) -> None:
    """mypy finds nothing in the programs; parts of programs use names that the page explains."""
    for number, block in enumerate(of_language("python")):
        (tmp_path / f"block_{number}.py").write_text(f"# {block}\n{block.text}")
    config = tmp_path / "mypy.ini"
    skipped = [
        "[mypy]\nignore_missing_imports = True\nfollow_imports = skip",
        "[mypy-chairlift.*]\nfollow_imports = silent",
    ]
    config.write_text("\n".join(skipped))
    options = ["--config-file", str(config), "--disable-error-code", "name-defined"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, sorted(tmp_path.glob("*.py")))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_is_json(block: Block) -> None:
    """An ellipsis stands for what the example leaves out."""
    text = re.sub(
        r",?\s*…(?=\s*[\]}])|(?<=: )…|(?<=\{)…|(?<=\[)…", lambda match: "0" if ":" in match[0] else "", block.text
    )
    decoder, at = json.JSONDecoder(), 0
    text = text.strip()
    while at < len(text):  # one document, or one in each line
        _, end = decoder.raw_decode(text, at)
        at = end + (len(text[end:]) - len(text[end:].lstrip()))


@pytest.mark.parametrize("block", of_language("yaml", "toml"), ids=str)
def test_configuration_can_be_read(block: Block, tmp_path: Path) -> None:
    read: Any = yaml.safe_load if block.language == "yaml" else tomllib.loads
    assert isinstance(read(block.text), dict)
    if "chairlift serve --config" in block.text:
        file = tmp_path / f"config.{block.language}"
        file.write_text(block.text)
        assert read_config_file(file, (*options_of(EngineOptions), *options_of(ServerOptions)))


@pytest.mark.parametrize("block", of_language("js"), ids=str)
def test_javascript_can_be_read(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.mjs").write_text(block.text)
    done = subprocess.run(
        [require_tool("node"), "--check", str(tmp_path / "block.mjs")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Flags of other programs that the pages name.
OTHER_FLAGS = {
    *("--api-server-count", "--tensor-parallel-size"),
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--dashboard-host", "--include-dashboard"),
    *("--max-worker-port", "--min-worker-port", "--metrics-export-port", "--node-manager-port"),
    *("--object-manager-port", "--ray-client-server-port", "--runtime-env-agent-port"),
    *("--prometheus-port", "--service-discovery", "--endpoint-type", "--tool", "--dist", "--dry"),
    *("--group-size", "--weight-format", "--gpus"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_commands_in_sentences_exist(page: Path) -> None:
    known = all_flags() | OTHER_FLAGS
    for code in inline_code(page):
        if code.startswith("chairlift "):
            for command in commands(re.sub(r"[\[\]]|…|\.\.\.", " ", code)):
                check_chairlift(list(command.words[1:]), names_only=True)
        elif code.strip() and code.split()[0] not in {*OTHERS, "python"}:
            flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
            assert [flag for flag in flags if flag not in known] == [], code


def test_paths_beside_those_of_other_servers_exist() -> None:
    paths = [code for code in inline_code(ROOT / "docs" / "coming-from.md") if re.fullmatch(r"/[\w/-]+", code)]
    assert len(paths) > 20
    assert [path for path in paths if not is_path(path)] == []
