"""The repeatable profile of Hypothesis generates the same examples whatever else is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import tests.conftest
if sys.argv[1:]:
    import chairlift.config
    import tests.prompts
from hypothesis import given, settings, strategies as st

@settings(max_examples=300)
@given(st.integers(), st.text(), st.floats())
def examples(integer, text, number):
    print(ascii((integer, text, number)))

examples()
"""


def examples(*arguments: str) -> str:
    command, environment = (
        [sys.executable, "-c", PROGRAM, *arguments],
        os.environ | {"HYPOTHESIS_PROFILE": "repeatable"},
    )
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_examples_do_not_depend_on_loaded_modules() -> None:
    alone = examples()
    assert len(alone.splitlines()) >= 300
    assert examples("with other modules") == alone
