"""The recording that `chairlift bench speculation --ablate` replays can be made again."""

from __future__ import annotations

from pathlib import Path

from chairlift.core.events import TokenProduced
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import LoadedModel
from chairlift.speculation.head_layers import MAX_LENGTH
from chairlift_lab.bench.speculation import encode_prompt
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.speculation_replay import record
from chairlift_lab.common.workload import SCENARIOS

ANSWERS, TOKENS = 2, 12


def plain_answer(maker: EngineMaker, prompt: list[int]) -> list[int]:
    engine, tokens = maker.engine(), []
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    while engine.has_work:
        tokens += [event.token for event in engine.step() if isinstance(event, TokenProduced)]
    return tokens


def test_a_recording_has_plain_answers_and_a_draft_at_every_position(tiny: LoadedModel, draft: Path) -> None:
    maker = EngineMaker(tiny, {"device": "cpu", "kv_memory": "4MiB"})
    lengths = [min(MAX_LENGTH, TOKENS - count - 1) for count in range(1, TOKENS)]
    for index, answer in enumerate(record(maker, "chat", f"draft:{draft}", ANSWERS, TOKENS)):
        assert answer.prompt == encode_prompt(maker, SCENARIOS["chat"](index))
        assert answer.output == plain_answer(maker, answer.prompt)
        assert [len(tokens) for tokens in answer.drafts] == [len(levels) for levels in answer.levels] == lengths
