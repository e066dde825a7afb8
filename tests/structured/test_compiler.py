"""Compiling structures: allowed texts, refused structures and limits."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter, TemporaryFailure
from chairlift.structured import trial_process
from chairlift.structured.compiler import BadStructure, GrammarCompiler, GrammarLimits, grammar_of
from chairlift.structured.trial_process import TrialProcess
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends
from tests.tiny import byte_level_tokenizer

END = 2


def make_compiler(**limits: Any) -> GrammarCompiler:
    tokenizer = Tokenizer(byte_level_tokenizer())
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 9, {END}, GrammarLimits(**limits))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler(seconds=0.5)


def texts(compiler: GrammarCompiler, structure: Structure, count: int = 40, limit: int = 60) -> set[str]:
    """Random texts that the grammar allows."""
    matcher, tokenizer = compiler.compile(structure).result(), compiler._tokenizer
    found = set()
    for seed in range(count):
        rng, copy, tokens = random.Random(seed), matcher.deep_copy(), list[int]()
        while not copy.is_stopped() and len(tokens) < limit:
            mask = int.from_bytes(copy.compute_bitmask(), "little")
            token = rng.choice([token for token in range(400) if mask >> token & 1])
            assert copy.consume_token(token)
            tokens.append(token)
        if copy.is_stopped():
            found.add(tokenizer.decode([token for token in tokens if token != END], skip_special_tokens=False))
    return found


def test_every_kind_of_structure_allows_its_texts(compiler: GrammarCompiler) -> None:
    assert texts(compiler, Structure.choice(["red", 'dark "green"', "é👍\n\\"])) == {"red", 'dark "green"', "é👍\n\\"}
    assert texts(compiler, Structure.regex(r"^(yes|no)/\d$"), 200) == {
        f"{w}/{d}" for w in ("yes", "no") for d in range(10)
    }
    assert texts(compiler, Structure.grammar('start: "a" ("b" | "c")')) == {"ab", "ac"}
    assert texts(compiler, Structure.grammar('root ::= "a" ("b" | digit)\ndigit ::= [0-1]')) == {"ab", "a0", "a1"}
    schema = {
        "type": "object",
        "properties": {"x": {"enum": [1, None]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    assert {json.dumps(json.loads(text)) for text in texts(compiler, Structure.json(schema))} == {
        '{"x": 1}',
        '{"x": null}',
    }
    objects = texts(compiler, Structure.json_object())
    assert objects
    assert all(isinstance(json.loads(text), dict) for text in objects)


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Structure.json({"type": "boolean"})).result().deep_copy()
    space = compiler._tokenizer.encode(" ")
    assert sum(matcher.try_consume_tokens(space) for _ in range(200)) <= 1


BAD = [
    (Structure.regex("["), "unclosed"),
    (Structure.regex("(?=a)b"), "look-ahead"),
    (Structure.json("{"), "not valid JSON"),
    (Structure.json("[]"), "must be an object"),
    (Structure.json(False), "allows nothing"),
    (Structure.json({"type": "strin"}), "strin"),
    (Structure.json({"not": {"type": "string"}}), "not"),
    (Structure.json({"$ref": "https://example.com/schema"}), "example.com"),
    (Structure.json({"x-guidance": {"lenient": True}}), "x-guidance"),
    (Structure.json({"type": "object", "required": ["a"], "properties": {"a": False}}), "nsatisfiable"),
    (Structure.choice([]), "at least one"),
    (Structure.choice(["a", ""]), "non-empty"),
    (Structure.choice(["a", 5]), "strings"),  # type: ignore[list-item]
    (Structure.grammar("start: missing"), "line 1, column 8: unknown name"),
    (Structure.grammar("start: <nothing>"), "special token"),
    (Structure.grammar("no grammar at all"), "line 1"),
    (Structure.grammar('root ::= "a'), "GBNF"),
]


@pytest.mark.parametrize(("structure", "words"), BAD, ids=lambda value: str(value)[:50])
def test_an_invalid_structure_is_refused_with_the_reason(
    compiler: GrammarCompiler, structure: Structure, words: str
) -> None:
    with pytest.raises(BadStructure) as refusal:
        compiler.compile(structure).result()
    message = str(refusal.value)
    assert words in message
    assert "\n" not in message
    assert len(message) <= 300
    assert "no_forcing" not in message  # no message quotes the text that is added to the caller's


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def references(count: int) -> dict[str, Any]:
    chain = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": chain | {f"r{count}": {"type": "integer"}}}


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "x"' for i in range(count)) + f'\nr{count}: "a"'


TOO_EXPENSIVE: dict[str, tuple[Structure, str | None]] = {
    "deep schema": (Structure.json(nested(40)), "nested"),
    "deeper than the recursion limit": (Structure.json('{"anyOf":[' * 5000 + "{}" + "]}" * 5000), "nested"),
    "a chain of references that overflows the stack": (Structure.json(references(2500)), "too complex"),
    "a chain of rules that overflows the stack": (Structure.grammar(rules(6000)), "too complex"),
    "a regex that takes a minute": (Structure.regex("(a|b*)" * 20_000), "takes more than 0.5 s"),
    "patterns that take a minute": (
        Structure.json({"allOf": [{"type": "string", "pattern": f"a{i}.*b"} for i in range(1000)]}),
        "takes more than 0.5 s",
    ),
    "alternatives that no parser keeps apart": (
        Structure.json({"anyOf": [{"type": "object", "properties": {"a": {"const": i}}} for i in range(2000)]}),
        None,
    ),
}


@pytest.mark.parametrize("name", TOO_EXPENSIVE)
def test_a_structure_that_is_too_expensive_is_refused_and_the_next_one_works(
    compiler: GrammarCompiler, name: str
) -> None:
    structure, words = TOO_EXPENSIVE[name]
    with pytest.raises(BadStructure, match=words):
        compiler.compile(structure).result()
    assert texts(compiler, Structure.choice([name])) == {name}, "the next structure is compiled"


@pytest.mark.parametrize(
    "structure",
    [
        Structure.json({"enum": [f"number {i}" for i in range(5000)]}),
        Structure.choice([f"number {i}" for i in range(5000)]),
        Structure.json(nested(25)),
        Structure.json(references(100)),
        Structure.regex("(?:(?:a{1000}){1000}){1000}"),
        Structure.regex("a{100000}"),
        Structure.regex("((a*)*)*(x+x+)+y"),
        Structure.json({"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9}),
    ],
    ids=lambda structure: structure.text[:30],
)
def test_a_large_structure_is_accepted_if_it_is_cheap(compiler: GrammarCompiler, structure: Structure) -> None:
    assert not compiler.compile(structure).result().is_error()


def test_equal_structures_are_compiled_once_and_errors_are_cached() -> None:
    compiler = make_compiler()
    first = compiler.compile(Structure.regex("a+", "guided_regex"))
    assert compiler.compile(Structure.regex("a+", "structured_outputs")) is first
    bad = compiler.compile(Structure.regex("["))
    assert isinstance(bad.exception(), BadStructure)
    assert compiler.compile(Structure.regex("[")) is bad


def test_the_cache_is_bounded_and_keeps_what_was_used_most_recently() -> None:
    compiler = make_compiler(cached=3, cached_characters=1000)
    futures = {name: compiler.compile(Structure.choice([name])) for name in "abc"}
    assert compiler.compile(Structure.choice(["a"])) is futures["a"]
    compiler.compile(Structure.choice(["d"]))
    assert len(compiler._cache) == 3
    assert compiler.compile(Structure.choice(["a"])) is futures["a"]
    assert compiler.compile(Structure.choice(["b"])) is not futures["b"]
    compiler.compile(Structure.choice(["long" * 240]))
    assert sum(len(structure.text) for structure in compiler._cache) <= 1000


def test_a_cancelled_structure_is_not_compiled() -> None:
    compiler = make_compiler(workers=1)
    compiler.compile(Structure.choice(["first"]))  # keeps the only worker busy for a while
    waiting = Structure.choice(["second"])
    future = compiler.compile(waiting)
    compiler.cancel(waiting)
    assert future.cancelled()
    assert compiler.compile(waiting).result() is not None


def test_a_grammar_is_tried_again_if_the_process_is_killed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialProcess(make_compiler()._vocabulary, 30.0)
    grammar = grammar_of(Structure.choice(["a"]))
    assert trial.problem(grammar) is None
    assert trial._process is not None
    trial._process.kill()  # while it is idle
    trial._process.wait()
    assert trial.problem(grammar) is None

    def request_and_kill(process: subprocess.Popen[str], message: object) -> str:
        if isinstance(message, dict) or process is not trial._process:  # a vocabulary, or another test's grammar
            return request(process, message)
        process.kill()
        process.wait()
        kills.append(process.pid)
        return ""

    request, kills = trial_process._request, list[int]()
    monkeypatch.setattr(trial_process, "_request", request_and_kill)
    with pytest.raises(TemporaryFailure):
        trial.problem(grammar)
    assert len(set(kills)) == 2
    monkeypatch.undo()
    assert trial.problem(grammar) is None
    trial.close()
    with pytest.raises(TemporaryFailure):
        trial.problem(grammar)


def test_no_process_and_no_file_descriptor_is_left() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    files = len(os.listdir("/proc/self/fd"))
    before = children.read_text().split()
    compiler = make_compiler(seconds=0.2)
    for count in range(20_000, 20_003):  # each of them ends its process
        assert compiler.compile(Structure.regex("(a|b*)" * count)).exception() is not None
    assert compiler.compile(Structure.choice(["a"])).exception() is None
    slow = compiler.compile(Structure.regex("(a|b*)" * 20_004))
    while not slow.running():
        time.sleep(0.01)
    compiler.shut_down()
    assert slow.exception() is not None
    compiler._workers.shutdown()
    del compiler, slow
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(children.read_text().split()) <= len(before)


@pytest.mark.parametrize(
    "name", [name for name in backends.ALL if name not in ("word piece", "no decoder", "unusual order")]
)
def test_the_bytes_of_tokens_are_those_of_the_text(name: str) -> None:
    """For every kind of tokenizer, the grammar reads what a verbatim detokenizer writes."""
    tokenizer = Tokenizer(backends.ALL[name]())
    assert tokenizer.has_token_bytes
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size + 5)]
    assert tokens[-5:] == [b""] * 5
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(8)]
        stream = tokenizer.detokenizer(skip_special_tokens=False, verbatim=True)
        text = "".join(map(stream.push, ids)) + stream.flush()
        written = b"".join(tokens[token] for token in ids)
        assert text.replace("\ufffd", "") == written.decode("utf-8", "ignore")


@pytest.mark.parametrize("name", ["byte level", "byte fallback, strip", "byte fallback"])
def test_any_text_can_be_forced_with_any_tokenizer(name: str) -> None:
    tokenizer = Tokenizer(backends.ALL[name]())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {END})
    choices = ["  The lift", "缆车 né\t👍🏽", 'a"b\\c']
    matcher = compiler.compile(Structure.choice(choices)).result()
    seen = set()
    for seed in range(20):
        rng, copy = random.Random(seed), matcher.deep_copy()
        stream, text = tokenizer.detokenizer(verbatim=True), ""
        while not copy.is_stopped():
            mask = int.from_bytes(copy.compute_bitmask(), "little")
            token = rng.choice([token for token in range(tokenizer.vocab_size) if mask >> token & 1])
            assert copy.consume_token(token)
            text += stream.push(token)
        seen.add(text + stream.flush())
    assert seen == set(choices)


@pytest.mark.parametrize("name", ["word piece", "no decoder", "unusual order"])
def test_a_tokenizer_that_no_grammar_can_follow_is_refused(name: str) -> None:
    tokenizer = Tokenizer(backends.ALL[name]())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {1})
    with pytest.raises(InvalidParameter) as refusal:
        compiler.compile(Structure.json_object("response_format"))
    assert refusal.value.parameter == "response_format"


def test_text_that_the_vocabulary_cannot_encode_is_refused() -> None:
    tokenizer = Tokenizer(backends.metaspace())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {1})
    with pytest.raises(BadStructure):
        compiler.compile(Structure.choice(["xyz"])).result()
    assert compiler.compile(Structure.choice([" the lifts"])).exception() is None


def test_markers_can_be_named_in_grammars_and_are_never_text() -> None:
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("  ", special=False)])
    backend.add_special_tokens(["[CALLS]"])
    tokenizer = Tokenizer(backend)
    call, calls = backend.token_to_id("<tool_call>"), backend.token_to_id("[CALLS]")
    assert {call, calls} <= tokenizer.marker_ids
    assert backend.token_to_id("  ") not in tokenizer.marker_ids
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {END})

    def first(grammar: str) -> list[int]:
        mask = int.from_bytes(compiler.compile(Structure.grammar(grammar)).result().compute_bitmask(), "little")
        return [token for token in range(tokenizer.vocab_size) if mask >> token & 1]

    assert first('start: <tool_call> "x"') == [call]
    assert first(f'start: <[{calls}]> "x"') == [calls]
    assert first('start: "<tool_call>"') == [tokenizer.token_id("<")]
    assert not {call, calls, END} & set(first("start: /(.|\\n)+/"))
