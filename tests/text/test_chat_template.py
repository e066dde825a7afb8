"""Chat templates render as in transformers, are sandboxed and bounded, and their errors name the cause."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from typing import Any

import pytest

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text import chat_template
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.tokenizer import Tokenizer
from tests.text import backends

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'system' and tools %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""

INST = """{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}{% set system = messages[0]['content'] | trim %}
{% else %}
{% set rest = messages %}{% set system = none %}
{% endif %}
{% set turn = namespace(count=0) %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant') }}
    {% endif %}
    {% set turn.count = turn.count + 1 %}
    {% if loop.first and system is not none %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {%- set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {% else %}
        {%- generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% if loop.index > 99 %}"
    "{% break %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

USER = {"role": "user", "content": "How are you?  "}
SYSTEM = {"role": "system", "content": " Speak like a pirate — größer, 缆车 & <b> "}
ASSISTANT = {"role": "assistant", "content": "Fine, 'thanks'."}
TOOL = {
    "type": "function",
    "function": {"name": "météo", "parameters": {"type": "object", "properties": {"z": {}, "a": {"x": 1}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "météo", "arguments": {"a": "Zürich & <x>"}}}
CONVERSATIONS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT]]


@pytest.mark.parametrize("template", [CHATML, INST, GEMMA], ids=["chatml", "inst", "gemma"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(template: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    ours, theirs = both(template)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_tools_and_variables_render_as_transformers_does() -> None:
    ours, theirs = both(CHATML)
    messages = [SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]
    expected = theirs.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert ours.apply_chat_template(messages, tools=[TOOL], enable_thinking=False) == expected
    assert "größer" in expected
    assert '{"a": "Zürich & <x>"}' in expected
    assert expected.endswith("<think></think>")


def both(template: str) -> tuple[Tokenizer, Any]:
    transformers = pytest.importorskip("transformers")
    backend = backends.byte_fallback(strip=True)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    return Tokenizer(backend, chat_template=template, bos_token="<s>", eos_token="</s>"), theirs


def test_content_may_be_text_parts_and_arguments_may_be_json_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    call = {"function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.x[1] }}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "2"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Oslo", "da', {"city": "Oslo"}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": [{"b": tru', {"a": [{}]}),
        ('{"a": "x\\u00', {}),
        ('{"a": "x,{\\"', {"a": 'x,{"'}),
        ("{", {}),
    ],
)
def test_arguments_that_were_cut_off_are_completed(arguments: str, shown: dict[str, Any]) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    assert json.loads(template.render([{"role": "assistant", "tool_calls": [call]}])) == shown


@pytest.mark.parametrize("arguments", ["hello", "3", "[1", '{"a" "b"', '{"a": 1}}', '{"a": 1 "b": 2', "{" * 5000])
def test_arguments_that_are_no_json_are_refused(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(InvalidParameter, match=r"function\.arguments: must be JSON text"):
        ChatTemplate(CHATML).render([message])


def test_refusals_of_earlier_responses_are_content() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].refusal is defined }}")
    parts = [{"type": "refusal", "refusal": "I cannot"}, {"type": "text", "text": "help"}]
    for message, shown in (
        ({"content": parts}, "I cannot\nhelpFalse"),
        ({"content": None, "refusal": "No"}, "NoFalse"),
        ({"content": "Yes", "refusal": None}, "YesFalse"),
        ({"content": None}, "False"),
    ):
        assert template.render([{"role": "assistant", **message}]) == shown
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content\[0\]: only parts of type 'text'"):
        template.render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        ([USER, "x"], "messages[1]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([USER, USER, {"role": "user"}], "messages[2].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([{"role": "assistant", "content": None, "tool_calls": "f"}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_errors_name_the_invalid_message(messages: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.parameter == parameter


def test_endless_nesting_is_refused() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(InvalidParameter, match="levels deep"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x", "extra": nested}])


def test_an_exception_of_the_template_names_the_messages() -> None:
    with pytest.raises(InvalidParameter, match=r"messages: .*Roles must alternate"):
        ChatTemplate(INST).render([USER, USER], special_tokens={"bos_token": "<s>"})


def test_a_model_without_a_template_refuses_messages() -> None:
    with pytest.raises(InvalidParameter, match="this model has no chat template; use plain prompts"):
        Tokenizer(backends.byte_level()).apply_chat_template([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% include 'a' %}{% nonsense %}"])
def test_a_template_that_does_not_compile_is_an_unsupported_model(source: str) -> None:
    tokenizer = Tokenizer(backends.byte_level(), chat_template=source)
    assert tokenizer.encode("plain prompts still work")
    with pytest.raises(UnsupportedModel, match="cannot be compiled"):
        tokenizer.apply_chat_template([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ range.__init__.__globals__.keys() }}",
        "{% set ns = namespace() %}{% set ns.__html__ = messages.copy %}{{ ns | e }}",
        "{{ namespace(__html__=1) }}",
        "{% include '/etc/passwd' %}",
        "{{ missing.attribute }}",
        "{{ 'text' + 1 }}",
        "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 18 * 10 ** 18) }}",
        "{{ ('x' * (10 ** 10)) | length }}",
        "{{ ([0] * (10 ** 10)) | length }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_hostile_or_broken_template_ends_in_an_error(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(UnsupportedModel, match="chat template failed"):
        template.render([USER])


def test_the_callers_messages_are_not_modified() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    assert "'arguments': {'x': 1}" in ChatTemplate("{{ messages }}").render(messages)
    assert messages == before


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT", 1000)
    looping = ChatTemplate("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}")
    assert len(looping.render([{"role": "user", "content": "x" * 10}])) == 1000
    with pytest.raises(InvalidParameter, match="exceeds 1000 characters"):
        looping.render([{"role": "user", "content": "x" * 11}])


def test_unknown_variables_and_tools_that_the_template_ignores_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ style }}")
    assert template.render([USER], variables={"style": "!"}) == "How are you?  !"
    with pytest.raises(InvalidParameter, match="enable_thinking: is not a variable"):
        template.render([USER], variables={"enable_thinking": True})
    with pytest.raises(InvalidParameter, match="bos_token: is set by the engine"):
        template.render([USER], special_tokens={"bos_token": "<s>"}, variables={"bos_token": "x"})
    with pytest.raises(InvalidParameter, match="tools: this model's chat template has no place"):
        template.render([USER], tools=[TOOL])


def test_templates_can_use_every_special_token() -> None:
    tokenizer = Tokenizer(
        backends.byte_level(), chat_template="{{ bos_token }}{{ unk_token }}", template_variables={"unk_token": "<unk>"}
    )
    assert tokenizer.apply_chat_template([USER]) == "<unk>"


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", clock=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 July 2024"


@pytest.mark.parametrize("template", [CHATML, INST, GEMMA])
@pytest.mark.parametrize("end", ["The lift", "The lift ", "The <|im_end|> lift", "a\n"])
def test_the_final_message_is_continued(template: str, end: str) -> None:
    """The prompt is what comes before the end of the message, whatever the template adds or trims after it."""
    tokenizer = Tokenizer(backends.byte_level(), chat_template=template, bos_token="<s>", eos_token="</s>")
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": end}]
    text, ids = tokenizer.encode_chat(messages, continue_final_message=True)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert text.endswith(end)
    assert whole.startswith(text.rstrip())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode_chat(messages, continue_final_message=True, add_generation_prompt=False)[0] == text


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ([{"role": "user", "content": "a"}], {"add_generation_prompt": True}, "together with add_generation_prompt"),
        ([{"role": "assistant", "content": ""}], {}, "no content to continue"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: Any, options: dict[str, Any], problem: str) -> None:
    tokenizer = Tokenizer(backends.byte_level(), chat_template=CHATML)
    with pytest.raises(InvalidParameter, match=f"continue_final_message: .*{problem}"):
        tokenizer.encode_chat(messages, continue_final_message=True, **options)


def test_a_template_that_changes_the_final_message_cannot_continue_it() -> None:
    tokenizer = Tokenizer(backends.byte_level(), chat_template="{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidParameter, match="does not show the final message"):
        tokenizer.encode_chat(messages, continue_final_message=True)
