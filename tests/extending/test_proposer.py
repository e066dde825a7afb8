"""A proposer from a file outside the package is used by name, and changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.proposers import PROPOSERS
from tests.extending.pages import load_toy, page_shows

TOY = "toy_proposer.py"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    load_toy(monkeypatch, PROPOSERS, TOY)


@pytest.mark.usefixtures("toy")
def test_a_toy_proposer_is_used_by_name_and_changes_no_token(checkpoint: Path) -> None:
    options = {"device": "cpu", "kv_memory": "2MiB", "progress": False}
    plain = LLM(str(checkpoint), **options)  # type: ignore[arg-type]
    fast = LLM(str(checkpoint), speculate="toy:3", draft_length=4, **options)  # type: ignore[arg-type]
    prompts = ["a chairlift never stops for boarding", "one two one two one"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={5: 100.0, 6: 100.0})
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, fast))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    speculation = fast.engine.scheduler.speculation
    assert isinstance(speculation, SpeculationController)
    assert speculation.proposer.name == "toy"
    assert speculation.proposer.accepted > 10  # type: ignore[attr-defined]


@pytest.mark.usefixtures("toy")
def test_its_argument_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidParameter, match="a number of tokens"):
        EngineConfig(speculate="toy:many")
    with pytest.raises(InvalidParameter, match="draft_length"):
        EngineConfig(speculate="toy", draft_length=5)


def test_an_unknown_name_is_rejected_with_all_choices() -> None:
    with pytest.raises(InvalidParameter, match=r"unknown speculate 'toy'; choose from draft, layers, ngram"):
        EngineConfig(speculate="toy")


def test_the_page_shows_the_toy() -> None:
    assert page_shows("proposer.md", TOY)
