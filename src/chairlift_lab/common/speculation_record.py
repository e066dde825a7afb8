"""Makes the recording that `chairlift bench speculation --ablate` replays:

    python -m chairlift_lab.common.speculation_record recording.json.gz

The default model answers the bench's prompts greedily. Its draft head drafts at every position, and no draft token is
verified, so that each position of an answer has a draft.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from chairlift.core.events import TokenProduced
from chairlift.core.request import Request
from chairlift.speculation.control.controller import SpeculationController
from chairlift.speculation.head_layers import MAX_LENGTH
from chairlift.speculation.proposers.base import Draft, DraftTerms, Proposer
from chairlift_lab.bench.speculation import encode_prompt
from chairlift_lab.common.engines import EngineMaker
from chairlift_lab.common.speculation_replay import RECORDED_HEAD, RecordedAnswer
from chairlift_lab.common.texts import SCENARIOS
from chairlift_lab.common.workload import full_length


class DraftRecorder(Proposer):
    """Keeps what another proposer drafts, and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.name, self.max_length = proposer.name, proposer.max_length
        self.drafts: dict[tuple[str, int], Draft] = {}  # The keys are request ids and numbers of output tokens.

    def propose(self, requests: Sequence[Request], terms: DraftTerms) -> list[None]:
        for request, draft in zip(requests, self._proposer.propose(requests, terms), strict=True):
            if draft is not None:
                self.drafts[request.id, request.num_output] = draft
        return [None] * len(requests)

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


def record(maker: EngineMaker, scenario: str, speculate: str, answers: int, tokens: int) -> list[RecordedAnswer]:
    """The model's first `answers` answers of a scenario, of `tokens` tokens each, with the drafts of `speculate`."""
    # One request at a time: neither its tokens nor the room for its drafts depends on others.
    engine = maker.engine(max_batch_requests=1, speculate=speculate, draft_length=MAX_LENGTH)
    controller = engine.scheduler.speculation
    assert isinstance(controller, SpeculationController)
    controller.proposer = recorder = DraftRecorder(controller.proposer)
    prompts = [encode_prompt(maker, SCENARIOS[scenario](index)) for index in range(answers)]
    outputs: dict[str, list[int]] = {engine.submit(prompt, full_length(tokens))[0]: [] for prompt in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
    engine.check_alive()
    recorded = []
    for prompt, (request_id, output) in zip(prompts, outputs.items(), strict=True):
        drafts = [recorder.drafts.get((request_id, count), Draft((), ())) for count in range(1, len(output))]
        levels = ["".join(map(str, draft.levels)) for draft in drafts]
        recorded.append(RecordedAnswer(prompt, output, [list(draft.tokens) for draft in drafts], levels))
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the default model's answers and its draft head's drafts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default=RECORDED_HEAD)
    parser.add_argument("--answers", type=int, default=16, help="per scenario")
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    given = parser.parse_args()
    maker = EngineMaker.load(given.model, {"device": "cpu", "prefix_caching": False})
    recording = {
        scenario: [asdict(one) for one in record(maker, scenario, given.speculate, given.answers, given.tokens)]
        for scenario in SCENARIOS
    }
    given.file.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
