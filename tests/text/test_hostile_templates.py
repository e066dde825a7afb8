"""Hostile chat templates end in an error, within bounds of time and memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from chairlift.server.wire.limits import Limits
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, front_end
from tests.server.running_server import HTTP
from tests.tiny import byte_level_tokenizer

MANY = "{% for i in range(1000) %}"
NS = "{% set ns = namespace(x='ab', y=[1], n=3) %}"
MEMORY = 200 * 2**20  # bytes beyond what Python and the imports take
BIG = "{% set big = 'x' * 8000000 %}"

HOSTILE = {
    "squares of integers": NS + MANY + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubling sums": NS + "{% for i in range(5000) %}{% set ns.n = ns.n + ns.n %}{% endfor %}{{ ns.n }}",
    "powers": "{{ 2 ** 64 ** 64 }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "a precise number": "{{ '%.1000000000f' % 1.5 }}",
    "a width from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "a wide number in a filter": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width from an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "a long argument many times": BIG + "{{ ('%s' * 1000) % ((big,) * 1000) }}",
    "a long argument in a format many times": BIG + "{{ ('{0}' * 1000).format(big) }}",
    "doubling ~": NS + MANY + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling +": NS + MANY + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling *": NS + MANY + "{% set ns.x = ns.x * 2 %}{% endfor %}",
    "doubling lists": NS + MANY + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "long texts in a list": NS + BIG + MANY + "{% set ns.y = ns.y + [big ~ i] %}{% endfor %}",
    "long lists in a list": NS + MANY + "{% set ns.y = ns.y + [[0] * 100000] %}{% endfor %}",
    "nested lists, printed": NS + MANY + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "nested tuples, compared": NS
    + "{% set other = namespace(y=[1]) %}{% for i in range(60) %}{% set ns.y = (ns.y, ns.y) %}"
    + "{% set other.y = (other.y, other.y) %}{% endfor %}{{ ns.y == other.y }}",
    "nested dicts": NS + MANY + "{% set ns.y = {'a': ns.y, 'b': ns.y} %}{% endfor %}{{ ns.y | tojson }}",
    "nested lists in a macro": "{% macro m(x, d) %}{% if d %}{{ m([x, x], d - 1) }}{% else %}{{ x }}{% endif %}"
    + "{% endmacro %}{{ m([], 60) }}",
    "dict() of itself": NS + MANY + "{% set ns.y = dict(a=ns.y, b=ns.y) %}{% endfor %}{{ ns.y | string }}",
    "namespaces in each other": NS + "{% set a = namespace(y=ns) %}",
    "namespaces in lists": NS + "{% set a = namespace(y=[ns, ns]) %}",
    "printing a namespace": NS + "{{ [ns] }}",
    "nested loops": "{% for a in messages %}" + "{% for b in 'x' * 1000 %}" * 6 + "{% endfor %}" * 6 + "{% endfor %}",
    "nested ranges": "{% for a in range(10**6) %}{% for b in range(10**6) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [[1, 1]] * 3 recursive %}{{ loop([[1, 1]] * 3) }}{% endfor %}",
    "macros that call twice": "{% macro m(d) %}{% if d %}{{ m(d - 1) }}{{ m(d - 1) }}{% endif %}{% endmacro %}"
    + "{{ m(100) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "indent": BIG + "{{ big.replace('x', '\n') | indent(1000) }}",
    "indent with a text": BIG + "{{ ('\n' * 1000000) | indent(big) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slice": "{{ [1] | slice(1000000000, 0) | list }}",
    "round": "{{ 1 | round(1000000000, 'ceil') }}",
    "replace": BIG + "{{ big | replace('x', 'yyyyyyyyyyyyyyyyyyyy') }}",
    "replace nothing": BIG + "{{ big | replace('', big) }}",
    "join": BIG + "{{ range(100000) | join(big) }}",
    "sum of lists": NS
    + "{{ ([[0] * 1000] * 1000) | sum(start=[]) | length }}{{ ([[0] * 1000] * 9000) | sum(start=[]) }}",
    "tojson with an indent": "{{ ([[1]] * 100000) | tojson(indent=1000) }}",
    "tojson with separators": BIG + "{{ ([1] * 100000) | tojson(separators=(big, big)) }}",
    "wordwrap": BIG + "{{ big | wordwrap(1, wrapstring=big) }}",
    "urlize": BIG + "{{ big | urlize }}",
    "map of filters": BIG + "{{ ([big] * 100) | map('replace', 'x', big) | list }}",
    "method center": "{{ 'x'.center(1000000000) }}",
    "method ljust": "{{ 'x'.ljust(1000000000) }}",
    "method zfill": "{{ 'x'.zfill(1000000000) }}",
    "method replace": BIG + "{{ big.replace('x', big) }}",
    "method join": BIG + "{{ big.join('x' * 100000) }}",
    "method expandtabs": "{{ ('\t' * 100000).expandtabs(1000000) }}",
    "method translate": BIG + "{{ big.translate({120: big}) }}",
    "method to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "an integer from a text": BIG + "{{ ('1' * 4000000) | int(base=2) }}",
    "a wide date": "{{ strftime_now('%1000000000d') }}",
    "endless output": "{% for i in range(1000000) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "a long literal": "{{ '" + "x" * 2**19 + "' }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500 + "{{ nothing.at_all }}",
    "deep expressions": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "constants that are large": "{{ ('x' * 1000) * 1000 * 1000 * 1000 }}",
    "a block set": NS + MANY + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
}


def render(source: str) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "hello"}])


PROGRAM = f"""
import resource
from pathlib import Path
from chairlift.errors import ChairliftError
from tests.text.test_hostile_templates import HOSTILE, render

used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + {MEMORY}, used + {MEMORY}))
for case, source in HOSTILE.items():
    try:
        print(case, "gives", len(render(source)))
    except ChairliftError as error:
        if isinstance(error.__cause__, MemoryError):
            print(case, "takes too much memory")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_hostile_templates_end_in_errors_within_a_limit_on_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


def test_ordinary_expressions_still_work() -> None:
    assert render("{{ ['a', 'b'] | join(', ') }}{{ 'a-b'.split('-') | length }}") == "a, b2"
    assert render("{{ '%s and %5.2f' % ('x', 1.5) }}|{{ '{} {:>4}'.format(1, 2) }}") == "x and  1.50|1    2"
    assert (
        render("{% for a, b in {'x': 1}.items() %}{{ loop.length }}{{ loop.last }}{{ a ~ b }}{% endfor %}") == "1Truex1"
    )
    assert render("{{ [3, 4] | sum }}{{ [{'a': 1}] | sum('a') }}{{ 'x\ny' | indent(2) }}") == "71x\n  y"
    assert render("{{ '%d' | format(5000) }}{{ [1, 9000] | select('gt', 5000) | first }}") == "50009000"
    assert render("{{ [1, [2, none]] | tojson(indent=1) }}") == "[\n 1,\n [\n  2,\n  null\n ]\n]"
    assert render("{% set x, y = 1, [2] %}{{ x }}{{ y }}{{ {'a': (1, 2)} }}") == "1[2]{'a': (1, 2)}"
    assert render("{{ 'a' | center(5) }}{{ 'abc' | replace('b', 'x') }}{{ 7 | default(5000) }}") == "  a  axc7"


def test_others_are_served_while_a_hostile_template_is_rendered() -> None:
    slow = "{% for a in range(900000) %}{{ 'x' if a == -1 }}{% endfor %}" * 3
    with front_end(tokenizer=Tokenizer(byte_level_tokenizer(), chat_template=slow), limits=Limits()) as front:
        statuses: list[int] = []
        chat = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}

        def send() -> None:
            statuses.append(HTTP.post(front.url + "/v1/chat/completions", json=chat).status_code)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        for _ in range(5):
            answer = HTTP.post(front.url + "/v1/responses", json={"model": NAME, "input": 3})
            assert answer.status_code == 400
            assert HTTP.get(front.url + "/health").status_code == 200
        for thread in threads:
            thread.join()
        assert statuses == [400] * 4
