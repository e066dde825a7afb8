"""The tools of a request are checked, shown to the model with any template, and enforced if a call is forced."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from chairlift.core.sampling.structure import Structure, StructureKind
from chairlift.errors import InvalidParameter
from chairlift.text.assistant_parts import ArgumentsDelta, CallBegun, ContentDelta, PlainParser
from chairlift.text.reasoning import ReasoningUse
from chairlift.text.reasoning_formats.harmony import HarmonyReasoning
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import choose_format
from chairlift.text.tool_formats.json_calls import HermesFormat, JSONFormat
from chairlift.text.tool_formats.named_calls import DeepSeekFormat, KimiFormat
from chairlift.text.tools.call_grammar import MAX_CALLS
from chairlift.text.tools.tool import MAX_TOOLS, Calling, checked_choice, checked_tools
from chairlift.text.tools.tool_use import ToolUse
from tests.tiny import CHATML, byte_level_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Bern"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
USER = {"role": "user", "content": "What is the weather?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "snow"}]},
]
LLAMA = "{% for m in messages %}{{ m }}{% endfor %}{{ tools }}<|python_tag|>"
NEW_MISTRAL = "{{ tools }}[TOOL_CALLS][ARGS]"
OLD_MISTRAL = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ call.id }} {% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}{% endfor %}"
)
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}{% if '</think>' in m.content %}?{% endif %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls %} {{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def tokenizer(template: str, *added: AddedToken) -> Tokenizer:
    backend: Backend = byte_level_tokenizer()
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    return Tokenizer(backend, chat_template=template, eos_token="<|im_end|>")


def use(template: str, tools: Any = (WEATHER, CLOCK), choice: Any = None, parallel: bool | None = None) -> ToolUse:
    return ToolUse.of(choose_format(template), list(tools), choice, parallel)


def plain(template: str) -> ReasoningUse:
    """A model without reasoning."""
    return ReasoningUse(None, tokenizer(template))


def prompt(template: str, messages: list[Any], tools: Any = (WEATHER, CLOCK), **options: Any) -> str:
    of_template = tokenizer(template)
    return of_template.decode(use(template, tools).encode(of_template, messages, **options), skip_special_tokens=False)


# ---- checks -----------------------------------------------------------------------------------------------------


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


def deep(levels: int) -> Any:
    return {"type": "object"} if not levels else {"properties": {"a": deep(levels - 1)}}


BAD_TOOLS = [
    (3, "must be a list"),
    ([3], r"^tools\[0\]: must be an object of type 'function'"),
    ([{"type": "retrieval"}], r"^tools\[0\]: must be an object of type 'function'"),
    ([{"type": "function"}], r"^tools\[0\].function: must be an object with a name"),
    ([CLOCK, function(name="")], r"^tools\[1\].function.name: must be 1 to 128"),
    ([function(name="a b")], "1 to 128 letters"),
    ([function(name="x" * 129)], "1 to 128 letters"),
    ([function(name="name\n")], "1 to 128 letters"),
    ([function(name=3)], "1 to 128 letters"),
    ([function(colour=3)], r"^tools\[0\].function.colour: unknown parameter"),
    ([function(description=3)], "description: must be text"),
    ([function(strict="yes")], "strict: must be true or false"),
    ([function(parameters=[1])], "parameters: must be a JSON schema"),
    ([function(parameters={"type": "string"})], "of type 'object'"),
    ([function(parameters=deep(13))], "nested more than 24 levels"),
    ([function(parameters={"description": "x" * 70_000})], "longer than 65536 bytes"),
    ([CLOCK, CLOCK], r"^tools\[1\].function.name: 'get_time' is duplicated"),
    ([function(name=f"f{i}") for i in range(MAX_TOOLS + 1)], "129 tools; the limit is 128"),
]


@pytest.mark.parametrize(("tools", "problem"), BAD_TOOLS, ids=lambda value: str(value)[:40])
def test_invalid_tools_are_refused(tools: Any, problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        checked_tools(tools)


def test_tool_choices() -> None:
    tools = checked_tools([CLOCK])
    assert checked_choice(None, tools).calling is Calling.AUTO
    assert checked_choice(None, []).calling is Calling.NONE
    assert checked_choice("auto", []).calling is Calling.NONE
    assert checked_choice("required", tools).forced
    named = checked_choice({"type": "function", "function": {"name": "get_time"}}, tools)
    assert (named.calling, named.function) == (Calling.NAMED, "get_time")
    unknown: list[Any] = ["always", 3, {}, {"type": "function"}, {"type": "function", "function": {"name": "x"}}]
    unknown += [{"type": "function", "function": {"name": "get_time", "colour": "red"}}]
    unknown += [{"type": "function", "function": {"name": "get_time"}, "colour": "red"}]
    for choice in unknown:
        with pytest.raises(InvalidParameter) as refused:
            checked_choice(choice, tools)
        assert refused.value.parameter == "tool_choice"
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
        with pytest.raises(InvalidParameter, match="needs tools"):
            checked_choice(choice, [])
    with pytest.raises(InvalidParameter, match="parallel_tool_calls"):
        ToolUse.of(JSONFormat(""), None, None, True)


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [CLOCK, function(name="other")]

    def restricted(mode: str, *names: str) -> ToolUse:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        return ToolUse.of(JSONFormat(""), tools, choice, True)

    assert [tool.name for tool in restricted("auto", "other").tools] == ["other"]
    assert restricted("required", "get_time").forced
    assert not restricted("auto").tools
    for refused in (("never", "other"), ("auto", "other", "third"), ("required",)):
        with pytest.raises(InvalidParameter, match="tool_choice"):
            restricted(*refused)
    for wrong in (None, [], {}, {"mode": "auto"}, {"mode": "auto", "tools": ["other"]}):
        with pytest.raises(InvalidParameter, match="allowed_tools"):
            ToolUse.of(JSONFormat(""), tools, {"type": "allowed_tools", "allowed_tools": wrong}, None)


def test_without_tools_all_text_is_content() -> None:
    for without in (use(HERMES, tools=()), use(HERMES, choice="none")):
        assert isinstance(without.parser(), PlainParser)
        assert without.structure(plain(HERMES)) is None
        assert tokenizer(HERMES, AddedToken("<tool_call>", special=True)).special_ids_of(without.markers) == []


def test_finish_reasons() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    for choice in (None, "required"):
        assert use(HERMES, choice=choice).finish_reason("stop", called=True) == "tool_calls"
    assert use(HERMES, choice=named).finish_reason("stop", called=True) == "stop"
    assert use(HERMES).finish_reason("stop", called=False) == "stop"
    assert use(HERMES).finish_reason("length", called=True) == "length"
    assert use(HERMES).finish_reason(None, called=True) is None


# ---- the prompt -------------------------------------------------------------------------------------------------


def test_a_template_that_shows_tools_gets_them() -> None:
    text = prompt(HERMES, [USER])
    assert json.loads(text.split("<tools>")[1].split("</tools>")[0]) == [WEATHER, CLOCK]
    assert "<tools>" not in prompt(HERMES, [USER], tools=())
    assert "get_time" not in tokenizer(HERMES).decode(use(HERMES, choice="none").encode(tokenizer(HERMES), [USER]))


def test_calls_and_results_reach_the_template() -> None:
    text = prompt(HERMES, [USER, CALLED, *RESULTS])
    assert text.endswith("[assistant]  get_time= get_weather=Oslo[tool] noon[tool] snow")


def test_mistral_templates_get_call_ids_of_nine_characters() -> None:
    text = prompt(OLD_MISTRAL, [USER, CALLED, *RESULTS]).split("[TOOL_CALLS]")[1]
    first, second, *results = text.split()
    assert [first, second] == results
    assert first != second
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in results)


def test_llama_templates_get_one_call_per_message() -> None:
    template = (
        "{{ tools }}<|python_tag|>{% for m in messages %}{% if 'tool_calls' in m %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}"
        "{{ m.tool_calls[0].function.name }} {% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    swapped = [RESULTS[1], RESULTS[0], {"role": "tool", "tool_call_id": "other", "content": "stray"}]
    text = prompt(template, [USER, CALLED, *swapped, {"role": "user", "content": "Thanks"}])
    assert text.endswith("What is the weather? get_time noon get_weather snow stray Thanks ")
    single = {**CALLED, "tool_calls": CALLED["tool_calls"][:1]}
    assert prompt(template, [USER, single, RESULTS[0]]).endswith("get_time noon ")


def test_tools_are_described_for_templates_that_do_not_show_them() -> None:
    text = prompt(CHATML, [{"role": "system", "content": "Be brief."}, USER, CALLED, *RESULTS])
    system, user, assistant, results, last = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in system
    assert '<tool_call>\n{"name": "function_name", "arguments": {"parameter": "value"}}\n</tool_call>' in system
    assert user == "user\nWhat is the weather?<|im_end|>\n"
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in assistant
    assert results.startswith("user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\nsnow\n</tool_response>")
    assert last == "assistant\n"
    assert prompt(CHATML, [USER]).startswith("<|im_start|>system\nYou can call functions")
    assert prompt(CHATML, [USER], tools=()) == prompt(CHATML, [USER], tools=[])
    assert "function" not in prompt(CHATML, [USER], tools=())
    assert "<tool_call>" in prompt(CHATML, [USER, CALLED, *RESULTS], tools=())  # history stays readable without tools


def test_the_description_is_in_the_user_message_if_system_messages_are_refused() -> None:
    text = prompt(NO_SYSTEM, [USER, CALLED, *RESULTS])
    assert text.startswith("<user>You can call functions")
    assert "\n\nWhat is the weather?<assistant><tool_call>" in text
    with pytest.raises(InvalidParameter, match="roles must alternate"):
        prompt(NO_SYSTEM, [USER, USER])


READS_CALLS = "{{ tools }}%s{%% for m in messages %%}{%% for c in m.tool_calls %%}%s;{%% endfor %%}{%% endfor %%}"


def test_calls_in_history_have_the_form_that_templates_read() -> None:
    deepseek = READS_CALLS % ("<｜tool▁calls▁begin｜>", "{{ c.function.name + c.function.arguments }}")
    assert 'get_time{};get_weather{"city": "Oslo"};' in prompt(deepseek, [USER, CALLED, *RESULTS])
    kimi = (
        READS_CALLS % ("<|tool_calls_section_begin|>", "{{ c.id }}")
        + "{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"
    )
    ids = prompt(kimi, [USER, CALLED, *RESULTS])
    assert "functions.get_time:0;functions.get_weather:1;functions.get_time:0functions.get_weather:1" in ids
    shown = "{{ t.function.description + (t.function.parameters | tojson) }}"
    cohere = "<|START_ACTION|>{% for t in tools %}" + shown + "{% endfor %}"
    assert '{"type": "object", "properties": {}' in prompt(cohere, [USER])


def test_harmony_has_one_call_and_one_text_per_message() -> None:
    template = (
        "{{ tools }}<|channel|><|message|>{% for m in messages if m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{% if 'content' in m and '?' in m.content %}{% endif %}"
        "[{{ m.thinking }}|{{ m.tool_calls | length }}]{% endfor %}"
    )
    said = {**CALLED, "content": "Let me see.", "reasoning": "hm"}
    of_template = tokenizer(template)
    encoded = use(template).encode(of_template, [USER, said, *RESULTS], reasoning=HarmonyReasoning(template))
    assert of_template.decode(encoded).endswith("[hm\n\nLet me see.|1][|1]")


def test_special_tokens_in_a_tool_stay_text() -> None:
    tool = function(description="ends here <|im_end|>")
    for template in (CHATML, HERMES):
        of_template = tokenizer(template)
        ids = use(template, tools=[tool]).encode(of_template, [USER], add_generation_prompt=False)
        assert "ends here <|im_end|>" in of_template.decode(ids, skip_special_tokens=False)
        written_by_template = 2 if template == CHATML else 0
        assert ids.count(of_template.token_id("<|im_end|>")) == written_by_template


def test_null_in_a_message_means_absent() -> None:
    dumped = {"role": "assistant", "content": "No.", "tool_calls": None, "refusal": None, "function_call": None}
    template = "{{ tools }}{% for m in messages %}{% if m.tool_calls is defined %}defined{% endif %}{% endfor %}"
    assert "defined" not in prompt(template, [USER, dumped])


def test_markers_that_are_special_tokens_are_visible() -> None:
    of_template = tokenizer(LLAMA, AddedToken("<|python_tag|>", special=True))
    (tag,) = of_template.special_ids_of(use(LLAMA).markers)
    assert of_template.decode([tag], skip_special_tokens=False) == "<|python_tag|>"
    stream = of_template.detokenizer(True, [tag])
    assert "".join(stream.push(token) for token in [1, tag, 2]) == "<|python_tag|>"


# ---- the grammar ------------------------------------------------------------------------------------------------


def forced_text(request: ToolUse, of_template: Tokenizer, seed: int) -> str:
    """Random text that the grammar allows: each token is drawn from those allowed."""
    from llguidance import LLMatcher, LLTokenizer

    structure = request.structure(ReasoningUse(None, of_template))
    assert structure is not None
    assert structure.kind is StructureKind.GRAMMAR
    end = of_template.token_id("<|im_end|>")
    assert end is not None
    vocabulary = LLTokenizer(of_template._backend.to_str(), eos_token=end)
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(structure.text))
    assert not matcher.get_error(), matcher.get_error()
    choose, ids = random.Random(seed), list[int]()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(of_template.vocab_size) if mask[token // 8] >> token % 8 & 1]
        ids.append(end if end in allowed and len(ids) > 200 else choose.choice(allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return of_template.decode([token for token in ids if token != end], skip_special_tokens=False)


def special(markers: Sequence[str]) -> tuple[AddedToken, ...]:
    return tuple(AddedToken(marker, special=True) for marker in markers)


TEMPLATES = {
    "hermes": (HERMES, ()),
    "hermes, tokens": (HERMES, (AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False))),
    "described": (CHATML, ()),
    "llama": (LLAMA, (AddedToken("<|python_tag|>", special=True),)),
    "mistral": (OLD_MISTRAL, (AddedToken("[TOOL_CALLS]", special=True),)),
    "new mistral": (NEW_MISTRAL, (AddedToken("[TOOL_CALLS]", special=True), AddedToken("[ARGS]", special=True))),
    "json": ("{{ tools }}", ()),
    "deepseek": ("{{ tools }}<｜tool▁calls▁begin｜>", special(DeepSeekFormat.markers)),
    "deepseek, fenced": ("{{ tools }}<｜tool▁calls▁begin｜>```json", ()),
    "kimi": ("{{ tools }}<|tool_calls_section_begin|>", special(KimiFormat.markers)),
    "granite": ("{{ tools }}<|tool_call|>", special(["<|tool_call|>"])),
    "phi": ("{{ tools }}<|/tool|>", special(["<|tool_call|>", "<|/tool_call|>"])),
    "cohere": ("{{ tools }}<|START_ACTION|>", special(["<|START_ACTION|>", "<|END_ACTION|>"])),
    "harmony": ("{{ tools }}<|channel|><|message|>", special(["<|channel|>", "<|message|>", "<|constrain|>"])),
    "qwen coder": ("{{ tools }}<tool_call><function=", special(["<tool_call>", "</tool_call>"])),
    "glm": ("{{ tools }}<tool_call><arg_key>", special(["<tool_call>", "</tool_call>"])),
    "minimax": ("{{ tools }}<minimax:tool_call>", ()),
    "pythonic": ("{{ tools }}func_name1(", ()),
}
ONE_CALL = ("harmony",)  # per message
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize(("choice", "parallel"), [("required", None), ("required", False), (NAMED, None)])
def test_forced_calls_are_valid_for_any_model(kind: str, choice: Any, parallel: bool | None) -> None:
    template, added = TEMPLATES[kind]
    of_template = tokenizer(template, *added)
    request = use(template, choice=choice, parallel=parallel)
    counts = set()
    for seed in range(6):
        text = forced_text(request, of_template, seed)
        reader = request.parser()
        parts = reader.push(text) + reader.close()
        names = [part.name for part in parts if isinstance(part, CallBegun)]
        counts.add(len(names))
        assert all(isinstance(part, (CallBegun, ArgumentsDelta)) for part in parts), text
        for index, name in enumerate(names):
            arguments = "".join(part.text for part in parts if isinstance(part, ArgumentsDelta) and part.index == index)
            if name == "get_weather":
                jsonschema_rs.validate(WEATHER["function"]["parameters"], json.loads(arguments))  # type: ignore[index]
            else:
                assert json.loads(arguments) == {}
        if choice == NAMED:
            assert names == ["get_weather"]
    single = choice == NAMED or parallel is False or kind in ONE_CALL
    assert counts == {1} if single else max(counts) > 1


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_json_schema_and_tools_allow_either(kind: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    template, added = TEMPLATES[kind]
    of_template, request = tokenizer(template, *added), use(template)
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
    requested = Structure.json(schema | {"required": ["name", "n"]}, "response_format")
    structure = request.structure(ReasoningUse(None, of_template), requested)
    assert structure is not None
    assert structure.parameter == "response_format"
    vocabulary = LLTokenizer(of_template._backend.to_str(), eos_token=of_template.token_id("<|im_end|>"))
    calls = request.format.write([("get_weather", '{"city": "Oslo", "days": 4}'), ("get_time", "{}")])
    if kind in ONE_CALL:
        calls = request.format.write([("get_time", "{}")]).removesuffix("<|call|>")
    alike = '{"name": "get_weather", "n": 5}'  # content that begins like a Llama call
    for text, fits in [(calls, True), (alike, True), ('{"name": "x"}', False), ("x", False)]:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(structure.text))
        ids = of_template.encode(text, add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, text


@pytest.mark.parametrize("kind", ["qwen coder", "glm", "minimax"])
def test_strings_without_quotes_follow_their_schema(kind: str) -> None:
    template, added = TEMPLATES[kind]
    code = {"type": "string", "pattern": "^[a-c]+/", "minLength": 3, "maxLength": 6}
    parameters = {
        "type": "object",
        "properties": {"code": code, "note": {"type": ["string", "null"]}},
        "required": ["code"],
    }
    request = use(template, [function(parameters=parameters)], choice="required", parallel=False)
    for seed in range(4):
        reader = request.parser()
        parts = reader.push(forced_text(request, tokenizer(template, *added), seed)) + reader.close()
        arguments = json.loads("".join(part.text for part in parts if isinstance(part, ArgumentsDelta)))
        jsonschema_rs.validate(parameters, arguments)
    dated = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    strict = use(template, [function(parameters=dated, strict=True)], choice="required")
    with pytest.raises(InvalidParameter, match="the format 'date' cannot be enforced"):
        strict.structure(plain(template))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_with_auto_a_call_that_begins_must_be_valid(kind: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    template, added = TEMPLATES[kind]
    of_template, request = tokenizer(template, *added), use(template)
    structure = request.structure(ReasoningUse(None, of_template))
    assert structure is not None
    assert structure.optional
    vocabulary = LLTokenizer(of_template._backend.to_str(), eos_token=of_template.token_id("<|im_end|>"))

    def fits(text: str) -> tuple[bool, bool]:
        """Whether a text is allowed, and whether it may end there."""
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(structure.text if structure else ""))
        ids = of_template.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()

    def written(days: int) -> str:
        return request.format.write([("get_weather", json.dumps({"city": "Oslo", "days": days}))]).removesuffix(
            "<|call|>"
        )

    for before in ("", "Let me see.\n"):
        assert fits(before + written(4)) == (True, True)
        assert not fits(before + written(99))[0], "beyond the maximum"
        assert not fits(before + written(4)[:-9])[1], "a call that began must end"
    for content in ("", "It snows.", 'see {"name": "x"} and [1](2) <tool', "a\n\nb"):
        assert fits(content) == (True, True)


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind not in ONE_CALL])
def test_the_number_of_forced_calls_is_bounded(kind: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    template, added = TEMPLATES[kind]
    of_template, request = tokenizer(template, *added), use(template, choice="required")
    structure = request.structure(ReasoningUse(None, of_template))
    assert structure is not None
    vocabulary = LLTokenizer(of_template._backend.to_str(), eos_token=of_template.token_id("<|im_end|>"))
    for count in (1, MAX_CALLS, MAX_CALLS + 1):
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(structure.text))
        ids = of_template.encode(request.format.write([("get_time", "{}")] * count), add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == (count <= MAX_CALLS)


def test_a_truncated_forced_call_is_not_content() -> None:
    text = HermesFormat("").write([("get_time", "{}"), ("get_weather", "{}")])
    for end in range(len(text)):
        reader = use(HERMES, choice="required").parser()
        assert not any(isinstance(part, ContentDelta) for part in reader.push(text[:end]) + reader.close())


def test_only_json_structures_can_be_combined_with_tools() -> None:
    assert use(HERMES).structure(plain(HERMES), Structure.json_object()) is not None
    with pytest.raises(InvalidParameter, match="regex: cannot be combined with tools"):
        use(HERMES).structure(plain(HERMES), Structure.regex("a+", "regex"))
    with pytest.raises(InvalidParameter, match="json: must be a JSON schema"):
        use(HERMES).structure(plain(HERMES), Structure.json("{", "json"))
    forced = use(HERMES, choice="required")
    content = Structure.json({"type": "object"}, "response_format")  # there will be none
    assert forced.structure(plain(HERMES), content) == forced.structure(plain(HERMES))
    with pytest.raises(InvalidParameter, match="guided_regex: does not go with a tool_choice"):
        forced.structure(plain(HERMES), Structure.regex("a+", "guided_regex"))


def test_keywords_that_cannot_be_enforced_are_ignored_unless_strict() -> None:
    from llguidance import LLMatcher

    unusual = {"type": "object", "properties": {"a": {"type": "string", "format": "unheard-of"}}}
    for strict in (False, True):
        request = use(HERMES, tools=[function(parameters=unusual, strict=strict)], choice="required")
        structure = request.structure(plain(HERMES))
        assert structure is not None
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(structure.text))
        assert bool(problem) == strict
