"""The reference pages name what the code has, and all of it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

import chairlift
from chairlift import errors
from chairlift.async_llm import AsyncLLM
from chairlift.cli.models import format_count
from chairlift.core.request import Request
from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS
from chairlift.core.sampling.params import PARAMETERS, SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.core.scheduler.waiting_queue import WaitingQueue
from chairlift.llm import LLM
from chairlift.loading.known_models import known_models
from chairlift.options import format_bytes
from chairlift.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamedText
from chairlift.server.anthropic.types import MessagesRequest
from chairlift.server.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from chairlift.server.openai.types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from chairlift.server.responses.types import ResponsesRequest

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, start: str, end: str = r"^(?:##? |\Z)") -> str:
    """The text of a page from the line that begins with `start` to the next heading."""
    text = (DOCS / page).read_text()
    begin = text.index(f"\n{start}") + 1
    after = text.index("\n", begin)
    stop = re.compile(end, re.MULTILINE).search(text, after)
    return text[begin : stop.start() if stop else None]


def first_cells(text: str) -> list[str]:
    """The code in the first cell of each row of the tables."""
    rows = re.findall(r"^\| (?!---)(.*?) \|", text, re.MULTILINE)
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


def public(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def names(codes: list[str]) -> list[str]:
    return [re.split(r"[(\[=]", code)[0] for code in codes]


PYTHON = "python.md"


def test_the_package_exports_what_the_page_lists() -> None:
    first = section(PYTHON, "| name | what |", r"^## ")
    assert set(first_cells(first)) == {name for name in chairlift.__all__ if not name.startswith("__")} - error_names()


def error_names() -> set[str]:
    return {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, Exception)}


def test_methods_of_llm() -> None:
    methods = {name for name in public(LLM) if inspect.isfunction(getattr(LLM, name))}
    assert set(names(first_cells(section(PYTHON, "## LLM")))) == methods


def test_keywords_of_methods_exist() -> None:
    for code in first_cells(section(PYTHON, "## LLM")):
        name, _, arguments = code.rstrip(")").partition("(")
        known = set(inspect.signature(getattr(LLM, name)).parameters)
        shown = {re.split(r"=", each.strip())[0] for each in arguments.split(",")} - {"", "*", "…", "**params"}
        assert shown <= known, code


def test_methods_of_async_llm() -> None:
    text = section(PYTHON, "## AsyncLLM")
    methods = {name for name in public(AsyncLLM) if inspect.isroutine(getattr(AsyncLLM, name))}
    assert methods == {code for code in re.findall(r"`(\w+)`", text) if hasattr(AsyncLLM, code)}


def test_every_sampling_parameter_has_a_line_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", section(PYTHON, "## SamplingParams"), re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in fields(SamplingParams)]
    assert dict(rows) == {field.name: str(field.default) for field in fields(SamplingParams)}
    assert set(dict(rows)) == set(PARAMETERS)


def test_structures() -> None:
    shown = set(names(re.findall(r"`(\w+\([^`]*\))`", section(PYTHON, "`Structure` has"))))
    made = {name for name in public(Structure) if inspect.ismethod(getattr(Structure, name))}
    assert shown == made


@pytest.mark.parametrize("of", [RequestOutput, CompletionOutput])
def test_fields_of_results(of: type) -> None:
    text = section(PYTHON, f"`{of.__name__}`:", r"^`\w+`|^## ")
    methods = {name for name in public(of) if inspect.isfunction(getattr(of, name))}
    assert set(first_cells(text)) == public(of) - methods | {field.name for field in fields(of)}  # type: ignore[arg-type]


def test_other_fields_of_results() -> None:
    text = section(PYTHON, "## Results")
    assert all(f"`{field.name}`" in text for field in fields(StreamedText))
    metrics = re.findall(r"`(\w+)`", next(line for line in text.splitlines() if line.startswith("| `metrics`")))[1:]
    assert set(metrics) <= public(RequestMetrics) | {field.name for field in fields(RequestMetrics)}


def test_errors() -> None:
    codes = re.findall(r"`(\w+)`", section(PYTHON, "## Errors"))
    assert error_names() <= set(codes)


def test_what_policies_see_exists() -> None:
    request = section(PYTHON, "`Request` (", r"^`WaitingQueue`")
    known = public(Request) | {field.name for field in fields(Request)}
    assert [name for name in first_cells(request) if name not in known] == []
    queue = section(PYTHON, "`WaitingQueue` (", r"^A policy returns")
    known = public(WaitingQueue) | {
        "len",
        "waiting",
        *re.findall(r"self\.([a-z]\w*) =", inspect.getsource(WaitingQueue)),
    }
    assert [name for name in names(first_cells(queue)) if name not in known] == []


HTTP = "http.md"


def official(params: Any) -> set[str]:
    """The fields of a client's typed dictionary, with those that it inherits."""
    bases = [base for base in getattr(params, "__orig_bases__", ()) if hasattr(base, "__annotations__")]
    return set(params.__annotations__).union(*map(official, bases))


def own_plugins() -> set[str]:
    """Sampling parameters that other tests of this process have registered."""
    registered = SAMPLING_PARAMETERS.registered().items()
    return {name for name, each in registered if not each.__module__.startswith("chairlift.")}


def shared_fields() -> set[str]:
    return set(first_cells(section(HTTP, "## All generation endpoints")))


ENDPOINTS = [
    ("Chat completions", ChatRequest, [chat_params.CompletionCreateParamsBase]),
    ("Completions", CompletionRequest, [completion_params.CompletionCreateParamsBase]),
    ("Responses", ResponsesRequest, [response_params.ResponseCreateParamsBase]),
    ("Messages", MessagesRequest, [message_params.MessageCreateParamsBase, beta_params.MessageCreateParamsBase]),
]
STREAM = {"stream"}  # The clients declare it beside the other fields.


@pytest.mark.parametrize(("heading", "own", "clients"), ENDPOINTS, ids=[each[0] for each in ENDPOINTS])
def test_own_fields_of_generation_endpoints(heading: str, own: Any, clients: list[Any]) -> None:
    known, documented = set(own.known_fields()) - own_plugins(), set().union(*map(official, clients))
    shown = set(first_cells(section(HTTP, f"## {heading}")))
    assert shared_fields() <= known
    assert shown == known - STREAM - documented - shared_fields()


def test_own_fields_of_embeddings() -> None:
    shown = set(first_cells(section(HTTP, "## Embeddings")))
    assert shown == set(EmbeddingRequest.known_fields()) - official(embedding_params.EmbeddingCreateParams)


@pytest.mark.parametrize(
    ("heading", "bodies"),
    [("Score", [ScoreRequest]), ("Rerank", [RerankRequest]), ("Tokenize", [TokenizeRequest, DetokenizeRequest])],
)
def test_fields_of_other_endpoints(heading: str, bodies: list[Any]) -> None:
    codes = set(re.findall(r"`(\w+)`", section(HTTP, f"## {heading}")))
    known = set().union(*(body.known_fields() for body in bodies))
    assert known <= codes
    assert set(first_cells(section(HTTP, f"## {heading}"))) <= known


def test_headers_are_those_of_the_code() -> None:
    text = section(HTTP, "## Headers")
    sources = [path.read_text() for path in (DOCS.parent / "src" / "chairlift" / "server").rglob("*.py")]
    own = {name for source in sources for name in re.findall(r'"(x-chairlift-[a-z-]+)"', source)}
    assert own == set(re.findall(r"`(x-chairlift-[a-z-]+)`", text))
    for header in first_cells(text):
        stem = re.sub(r"^(x-ratelimit-\w+)-requests$", r"\1", header)
        assert any(re.search(stem, source, re.IGNORECASE) for source in sources), header


def test_the_table_of_models_is_that_of_the_known_ones() -> None:
    rows = [
        f"| `{model.name}` | {format_count(model.num_parameters)} | {format_bytes(model.cpu_bytes)} "
        f"| {format_bytes(model.gpu_bytes)} | {model.context:,} | {model.licence}{', gated' if model.gated else ''} |"
        for model in known_models()
    ]
    text = (DOCS / "choose.md").read_text()
    assert [row for row in rows if row not in text] == []
    assert len(re.findall(r"^\| `[\w.-]+` \| [\d.]+[BM] ", text, re.MULTILINE)) == len(rows)


def test_models_that_are_advised_fit() -> None:
    """A fifth of the memory is left for the KV cache and the process."""
    text = section("choose.md", "So with this much free memory", r"^With less memory")
    models, count = {model.name: model for model in known_models()}, 0
    for size, on_cpu, on_gpu in re.findall(r"^\| (\d+) GB \| (.*?) \| (.*?) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", on_cpu):
            assert models[name].cpu_bytes < 0.8e9 * int(size), (name, size)
        for name in re.findall(r"`([^`]+)`", on_gpu):
            assert models[name].gpu_bytes < 0.8e9 * int(size), (name, size)
        count += 1
    assert count >= 5


def test_metrics_that_pages_name_exist() -> None:
    """The page about metrics is compared with the server's by another test."""
    known = set(re.findall(r"`(chairlift_\w+)`", (DOCS / "metrics.md").read_text()))
    known |= {f"{name}{suffix}" for name in known for suffix in ("_count", "_sum", "_bucket")}
    packages = {"chairlift_lab"}
    for page in DOCS.rglob("*.md"):
        named = set(re.findall(r"\b(chairlift_[a-z_]+)\b", page.read_text())) - packages
        assert named <= known, (page.name, named - known)
