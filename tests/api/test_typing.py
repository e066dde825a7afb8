"""What editors and type checkers know about the package: keywords, exports and documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

import chairlift
from chairlift.config import EngineConfig
from chairlift.engine_keywords import EngineKeywords
from chairlift.errors import InvalidParameter
from chairlift.llm import make_config
from chairlift.options import FIXED_OPTIONS, options_of

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
        ("colour", "colour: is not an option; choose from load_format, "),
    ],
)
def test_a_misspelled_keyword_is_refused_with_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        make_config({name: 3})
    assert str(raised.value).startswith(message)
