"""Drafts from models: a model that drafts for itself is always right, whatever happens to its blocks."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from chairlift.attention.batch import StepBatch
from chairlift.config import EngineConfig
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.models.decoder import Decoder
from chairlift.speculation import draft_models, draft_proposer
from chairlift.speculation.draft_models import FirstLayers, HeadNetwork
from chairlift.speculation.drafter import DraftTask
from chairlift.speculation.head_layers import HeadConfig, unit
from chairlift.speculation.head_states import KeptStates
from chairlift.speculation.proposers.base import A_FEW, Draft, DraftTerms
from chairlift_lab.commands.train_draft import TrainSettings
from chairlift_lab.training.train_draft import train_draft
from chairlift_lab.training.trainable_head import KeysValues, TrainableHead, WholeTextAttention
from tests.speculation.drafting import draft_by_pattern, fixed_length
from tests.speculation.running import (
    SETTINGS,
    assert_same_output,
    decoder_of,
    drafter_of,
    proposer_with,
    run,
    run_with_pauses,
    start,
    uneven_work,
)
from tests.tiny import write_tiny_checkpoint


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in ("static", "uncached")])
def test_a_model_that_drafts_for_itself_is_always_right(tiny: LoadedModel, folder: Path, setting: str) -> None:
    """Drafts are proposed in two of four steps, so that the draft model has tokens to catch up with."""
    options = SETTINGS[setting] | ({"kv_memory": "80KiB"} if "kv_memory" in SETTINGS[setting] else {})
    work = uneven_work(10)
    plain = run(start(tiny, **SETTINGS[setting]), work, arrive=run_with_pauses)
    engine = start(tiny, speculate=f"draft:{folder}", draft_length=3, **options)
    draft_by_pattern(engine.scheduler.speculation, lambda step: step % 4 < 2)
    fast = run(engine, work, arrive=run_with_pauses)
    assert_same_output(plain, fast)
    assert fast.proposed == fast.accepted > 20
    assert (fast.preemptions > 0) == (setting in ("preempted", "swapped"))


def test_a_draft_model_catches_up_in_parts_and_keeps_nothing_of_wrong_drafts(
    tiny: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled tokens are often not the likeliest, and those are what a model with the same weights drafts."""
    monkeypatch.setattr(draft_proposer, "MAX_CATCH_UP_TOKENS", 12)
    engine = start(tiny, speculate=f"draft:{folder}", draft_length=4)
    proposer, model = drafter_of(engine), decoder_of(tiny)
    draft_by_pattern(engine.scheduler.speculation, lambda step: step % 40 > 32)
    sizes: list[int] = []
    drafted: list[tuple[list[int], int]] = []
    caught_up: list[bool] = []  # in each step with a call of `propose`
    scores, propose = proposer._scores, proposer.propose

    def note_sizes(chunks: Sequence[Chunk]) -> torch.Tensor:
        sizes.append(sum(chunk.count for chunk in chunks if chunk.count > A_FEW))
        return scores(chunks)

    def note_drafts(requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft]:
        drafts = propose(requests, terms)
        caught_up.append(terms.did_extra_work)
        pairs = zip(requests, drafts, strict=True)
        drafted.extend((list(one.tokens), some.tokens[0]) for one, some in pairs if some.tokens)
        return drafts

    monkeypatch.setattr(proposer, "_scores", note_sizes)
    monkeypatch.setattr(proposer, "propose", note_drafts)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=110, ignore_eos=True)
    found = run(engine, [([70 + i, 80, 90], params.clone(seed=i)) for i in range(2)])
    assert 0 < max(sizes) <= 12
    assert len(drafted) > 10
    assert 0 < sum(caught_up) < len(caught_up)
    assert found.accepted < found.proposed
    for tokens, draft_token in drafted:
        row = torch.tensor(tokens)
        hidden = model.hidden_states(StepBatch(row, torch.arange(len(tokens))), WholeTextAttention(len(tokens))).last
        assert draft_token == int(model.logits(hidden[-1:]).argmax())


def test_drafts_of_all_layers_are_always_right_and_of_the_first_not_always(tiny: LoadedModel) -> None:
    work = uneven_work(8)
    plain = run(start(tiny), work)
    engine = start(tiny)
    engine.scheduler.speculation = fixed_length(proposer_with(engine, FirstLayers(decoder_of(tiny), 2)), 4)
    all_layers = run(engine, work)
    assert_same_output(plain, all_layers)
    assert all_layers.proposed == all_layers.accepted > 20
    first = run(start(tiny, speculate="layers:1", draft_length=2), work)
    assert_same_output(plain, first)
    assert first.proposed > first.accepted


@pytest.mark.slow
def test_drafts_change_nothing_with_8_bit_weights(folder: Path, draft: Path) -> None:
    """There, all layers are one kernel, which has to stop after the first ones, and the head is rounded as well."""
    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    work = uneven_work(6)
    plain = run(start(rounded), work)
    engine = start(rounded)
    engine.scheduler.speculation = fixed_length(proposer_with(engine, FirstLayers(decoder_of(rounded), 2)), 3)
    all_layers = run(engine, work)
    assert_same_output(plain, all_layers)
    assert all_layers.proposed == all_layers.accepted > 10
    for speculate in ("layers:1", f"draft:{draft}"):
        some = run(start(rounded, speculate=speculate, draft_length=2), work)
        assert_same_output(plain, some)
        assert some.proposed > some.accepted


@pytest.mark.parametrize("a_few", [A_FEW, 1])
def test_a_rounded_head_drafts_the_same_in_one_call_as_pass_by_pass(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, a_few: int
) -> None:
    """Also if more than `a_few` known tokens are computed in a call of their own."""
    monkeypatch.setattr(draft_models, "A_FEW", a_few)
    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    engine = start(rounded, speculate=f"draft:{draft}", draft_length=4)
    proposer = drafter_of(engine)
    network = proposer.network
    assert isinstance(network, HeadNetwork)
    assert network.one_call is not None
    head, states, draft_at_once = network.head, network.states, proposer._draft_at_once
    assert isinstance(states, KeptStates)
    equal: list[bool] = []
    cut: list[bool] = []  # because the head was not sure enough

    def both_ways(tasks: Sequence[DraftTask], terms: DraftTerms) -> list[Draft]:
        for index, task in enumerate(tasks):
            task.length = min(task.length, 1 + index % 4)  # not in descending order
            task.min_chance = 0.02 * (index % 2)
        before, call, fused = copy.deepcopy(states.pending), network.one_call, head._fused
        network.one_call, head._fused = None, None
        by_pass = proposer._draft_by_places(tasks, proposer._catch_up(tasks, terms))
        network.one_call, head._fused = call, fused
        states.pending = before
        found = draft_at_once(tasks, terms)
        assert [len(some.tokens) for some in found[::2]] == [task.length for task in tasks[::2]]
        cut.extend(len(some.tokens) < task.length for some, task in zip(found[1::2], tasks[1::2], strict=True))
        pairs = (zip_longest(one.tokens, other.tokens) for one, other in zip(found, by_pass, strict=True))
        equal.extend(one == other for some in pairs for one, other in some)
        return found

    monkeypatch.setattr(proposer, "_draft_at_once", both_ways)
    work = uneven_work(14)
    assert_same_output(run(start(rounded), work), run(engine, work))
    assert len(equal) > 100
    assert any(cut)
    # Embeddings of draft tokens have fewer bits in the kernel, which may decide between two tokens that are as good, or
    # whether one is likely enough; then those behind it differ as well.
    assert sum(equal) >= 0.9 * len(equal), f"{sum(equal)} of {len(equal)}"


def test_a_trained_head_changes_nothing_and_drafts_what_it_was_trained_to(tiny: LoadedModel, draft: Path) -> None:
    work = [(prompt, params.clone(max_tokens=12)) for prompt, params in uneven_work(5)]
    plain = run(start(tiny), work)
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=2, prefix_caching=False, max_prefill_tokens=7)
    drafted: list[tuple[Request, int, list[int]]] = []
    proposer = drafter_of(engine)
    propose = proposer.propose

    def note_drafts(requests: Sequence[Request], terms: DraftTerms) -> Sequence[Draft]:
        drafts = propose(requests, terms)
        drafted.extend((one, one.num_known, list(some.tokens)) for one, some in zip(requests, drafts, strict=True))
        return drafts

    proposer.propose = note_drafts  # type: ignore[method-assign]
    assert_same_output(plain, run(engine, work))
    assert len(drafted) > 20
    model = decoder_of(tiny)
    head, ids = load_trainable(draft, model)
    for request, num_known, drafts in drafted:
        assert drafts == offline_drafts(head, ids, model, list(request.tokens[:num_known]), len(drafts))


def load_trainable(folder: Path, model: Decoder) -> tuple[TrainableHead, torch.Tensor]:
    from safetensors.torch import load_file

    head = TrainableHead(HeadConfig.of(json.loads((folder / "config.json").read_text())), model)
    saved = load_file(folder / "model.safetensors")
    for name, tensor in head.tensors().items():
        tensor.copy_(saved[name])
    return head, saved["token_ids"].long()


@torch.no_grad()
def offline_drafts(head: TrainableHead, ids: torch.Tensor, model: Decoder, tokens: list[int], count: int) -> list[int]:
    """Draft from the whole text at once, without a cache, as in training: from the states of the depth before."""
    drafts: list[int] = []
    previous = None
    for depth in range(count):
        row = torch.tensor(tokens + drafts)
        # The target's states of draft tokens are unknown to the head, and must not matter: it reads its own there.
        hidden, taps = model.hidden_states(StepBatch(row, torch.arange(len(row))), WholeTextAttention(len(row)))
        assert taps
        features = torch.cat([unit(state) for state in (*taps, hidden)], dim=-1)
        seen: KeysValues = []
        previous = head.joint(features)[None]
        for _ in range(depth + 1):
            previous = head(model.embed(row)[None], torch.nn.functional.pad(previous[:, :-1], (0, 0, 1, 0)), seen)
        drafts.append(int(ids[model.logits(previous[0, -1:])[0, ids].argmax()]))
    return drafts


def test_training_resumes_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    settings = {"texts": 6, "length": 16, "batch": 2, "draft_vocab": 50, "device": "cpu"}
    train_draft(str(folder), tmp_path / "a", TrainSettings(epochs=1, **settings), [], lambda line: None)  # type: ignore[arg-type]
    lines: list[str] = []
    train_draft(str(folder), tmp_path / "a", TrainSettings(epochs=2, **settings), [], lines.append)  # type: ignore[arg-type]
    assert [line.split(",")[0] for line in lines if "step" in line] == [
        f"learning   step {step} of 6" for step in (4, 5, 6)
    ]
    assert not any(" of 6, " in line for line in lines if line.startswith("texts")), "the texts are there already"


def test_training_stops_in_time_with_a_usable_head(folder: Path, tiny: LoadedModel, tmp_path: Path) -> None:
    settings = TrainSettings(texts=6, length=16, batch=2, epochs=100_000, minutes=0.05, draft_vocab=50, device="cpu")
    lines: list[str] = []
    train_draft(str(folder), tmp_path, settings, [], lines.append)
    assert any(line.startswith("stopped") for line in lines)
    fast = run(start(tiny, speculate=f"draft:{tmp_path}"), uneven_work(3))
    assert_same_output(run(start(tiny), uneven_work(3)), fast)


@pytest.mark.parametrize("speculate", ["layers:2", "draft:nowhere/at/all", "draft:tiny-but-other"])
def test_drafts_that_do_not_fit_the_model_are_rejected(tiny: LoadedModel, tmp_path: Path, speculate: str) -> None:
    if speculate.endswith("other"):
        other = write_tiny_checkpoint(tmp_path / "other", more_special=["<|one|>", "<|two|>", "été"])
        speculate = f"draft:{other}"
    with pytest.raises(ChairliftError):
        start_engine(tiny, EngineConfig(device="cpu", kv_memory="1MiB", speculate=speculate))


def test_a_head_for_another_model_is_rejected(tiny: LoadedModel, draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    (tmp_path / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    with pytest.raises(InvalidParameter, match="trained for another model"):
        start_engine(tiny, EngineConfig(device="cpu", kv_memory="1MiB", speculate=f"draft:{tmp_path}"))


def test_a_head_keeps_no_state_of_finished_requests(tiny: LoadedModel, draft: Path) -> None:
    engine = start(tiny, speculate=f"draft:{draft}")
    run(engine, uneven_work(4))
    network = drafter_of(engine).network
    assert isinstance(network, HeadNetwork)
    assert isinstance(network.states, KeptStates)
    assert not network.states.pending
    assert not drafter_of(engine)._last_state
