"""What editors and type checkers know about the package: keywords, exports and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import chairlift
from chairlift import ChairliftError, SamplingParams, errors
from chairlift.config import EngineConfig
from chairlift.engine_keywords import EngineKeywords
from chairlift.errors import InvalidParameter
from chairlift.llm import make_config
from chairlift.options import FIXED_OPTIONS, options_of
from chairlift.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamedText,
)

SOURCE = Path(chairlift.__file__).parent
# Other modules are not followed, so that this takes a second.
SETTINGS = f"""
[mypy]
strict = true
mypy_path = {SOURCE.parent}
follow_imports = skip
[mypy-chairlift,chairlift.llm,chairlift.async_llm,chairlift.cluster.predictor,chairlift.engine_keywords]
follow_imports = silent
"""
CALLS = """\
from chairlift import LLM, AsyncLLM
from chairlift.cluster.predictor import BatchPredictor
LLM("m", max_batch_tokens=512, max_num_seqs=8, enforce_eager=True, trust_remote_code=False, kv_memory="1GiB")
LLM("m", max_batch_tokns=3)
LLM("m", max_batch_tokens="many")
AsyncLLM("m", max_waiting=3, prefix_cachin=False)
BatchPredictor("m", task="chat", threads="two")
"""


def test_mypy_finds_misspelled_and_mistyped_keywords(tmp_path: Path) -> None:
    settings, calls = tmp_path / "mypy.ini", tmp_path / "calls.py"
    settings.write_text(SETTINGS)
    calls.write_text(CALLS)
    arguments = ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), str(calls)]
    errors = [line.partition("calls.py:")[2] for line in api.run(arguments)[0].splitlines() if ": error:" in line]
    expected = [
        r'4: .*Unexpected keyword argument "max_batch_tokns" for "LLM"; did you mean "max_batch_tokens"',
        r'5: .*Argument "max_batch_tokens" to "LLM" has incompatible type "str"; expected "int \| None"',
        r'6: .*Unexpected keyword argument "prefix_cachin" for "AsyncLLM"; did you mean "prefix_caching"',
        r'7: .*Argument "threads" to "BatchPredictor" has incompatible type "str"',
    ]
    assert len(errors) == len(expected), errors
    assert all(re.match(*pair) for pair in zip(expected, errors, strict=True)), errors


def test_every_name_that_is_accepted_is_typed() -> None:
    options = options_of(EngineConfig)
    accepted = {name for one in options for name in (one.name, *one.aliases, *one.opposite_aliases)}
    assert EngineKeywords.__annotations__.keys() == accepted | FIXED_OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_batch_tokns", "max_batch_tokns: is not an option; did you mean max_batch_tokens?"),
        ("max_num_seq", "max_num_seq: is not an option; did you mean max_num_seqs?"),
        ("colour", "colour: is not an option; docs/options.md lists all"),
    ],
)
def test_a_misspelled_keyword_is_refused_with_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        make_config({name: 3})
    assert str(raised.value).startswith(message)


# ---- documentation and exports ------------------------------------------------------------------------------------

DOCUMENTED = (
    *(SamplingParams, RequestOutput, CompletionOutput, StreamedText, RequestMetrics, Logprob),
    *(EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput),
)


def lines_of(documented: type) -> dict[str, str]:
    """The line of each field in the docstring of a class, which `help` and editors show."""
    text = inspect.getdoc(documented) or ""
    entries = re.split(r"^    (?=\w+: )", text.partition(":\n    ")[2], flags=re.MULTILINE)
    return {name: " ".join(line.split()) for name, _, line in (entry.partition(": ") for entry in entries if entry)}


@pytest.mark.parametrize("documented", DOCUMENTED)
def test_every_field_has_a_line_of_documentation(documented: type) -> None:
    lines = lines_of(documented)
    assert [*lines] == [field.name for field in dataclasses.fields(documented)]  # type: ignore[arg-type]
    assert all(line.endswith(".") for line in lines.values())


@pytest.mark.parametrize("documented", [SamplingParams, RequestOutput, CompletionOutput])
def test_the_tables_of_the_page_have_the_same_lines(documented: type) -> None:
    page = (SOURCE.parents[1] / "docs" / "python.md").read_text()
    start = "## SamplingParams" if documented is SamplingParams else f"`{documented.__name__}`:"
    table = page[page.index(start) :].partition("\n|---")[2].partition("\n\n")[0]
    rows = {row[0]: row[-1] for row in re.findall(r"^\| `(\w+)` \|(?: \S+ \|)? (.*) \|$", table, re.MULTILINE)}
    shown = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, text in rows.items()}
    lines = {name: line.removesuffix(".") for name, line in lines_of(documented).items()}
    assert lines == {name: text for name, text in shown.items() if name != "finished"}


def test_the_package_exports_what_programs_need() -> None:
    own = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, ChairliftError)}
    assert own | {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput"} <= set(chairlift.__all__)
    assert sorted(chairlift.__all__) == sorted({*chairlift.__all__})
    assert all(getattr(chairlift, name) is not None for name in chairlift.__all__)
    assert set(chairlift.__all__) <= set(dir(chairlift))
    assert (SOURCE / "py.typed").exists()


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, chairlift; chairlift.InvalidParameter; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
