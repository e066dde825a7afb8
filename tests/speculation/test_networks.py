"""Drafts from networks: a model that guesses itself must always be right, whatever happens to its blocks."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.plan import Chunk
from chairlift.core.request import Request
from chairlift.core.sampling_params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.startup import LoadedModel, load_model, start_engine
from chairlift.errors import InvalidParameter
from chairlift.lab.training.train_draft import TrainSettings, train_draft
from chairlift.lab.training.trainable_head import Seen, TrainableHead, WholeTexts
from chairlift.models.decoder import Decoder
from chairlift.runner.base import ModelRunner
from chairlift.speculation import head_network as draft_head
from chairlift.speculation import network_proposer as drafter
from chairlift.speculation import networks as draft_networks
from chairlift.speculation.control.controller import SpeculationController, Wanted
from chairlift.speculation.control.draft_length import FixedLength
from chairlift.speculation.draft_head import unit
from chairlift.speculation.head_config import HeadConfig
from chairlift.speculation.head_network import Head
from chairlift.speculation.network_proposer import NetworkProposer
from chairlift.speculation.networks import FirstLayers
from tests.speculation.running import run, start
from tests.speculation.test_same_output import SETTINGS, same, uneven_work
from tests.tiny import write_tiny_checkpoint


class NowAndThen(FixedLength):
    """No drafts for a while, then some: what was computed meanwhile has to be caught up with."""

    def __init__(self) -> None:
        super().__init__(3)
        self._turn = 0

    def choose(self, candidates: Any, chunks: Any, proposer: Any) -> Sequence[int]:
        self._turn += 1
        return super().choose(candidates, chunks, proposer) if self._turn % 4 < 2 else [0] * len(candidates)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in ("static", "uncached")])
def test_a_model_that_guesses_itself_is_always_right(tiny: LoadedModel, folder: Path, setting: str) -> None:
    options = SETTINGS[setting] | ({"kv_memory": "80KiB"} if "kv_memory" in SETTINGS[setting] else {})
    work = uneven_work(10)
    plain = run(start(tiny, **SETTINGS[setting]), work, arrive=lambda index: index % 2 == 0)
    engine = start(tiny, speculate=f"draft:{folder}", draft_length=3, **options)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation.length = NowAndThen()
    fast = run(engine, work, arrive=lambda index: index % 2 == 0)
    same(plain, fast)
    assert fast.proposed == fast.accepted > 20
    assert (fast.preemptions > 0) == (setting in ("preempted", "swapped"))


class Seldom(FixedLength):
    """Drafts in a few steps only, with long pauses between."""

    def __init__(self) -> None:
        super().__init__(4)
        self._turn = 0

    def choose(self, candidates: Any, chunks: Any, proposer: Any) -> Sequence[int]:
        self._turn += 1
        return super().choose(candidates, chunks, proposer) if self._turn % 40 > 32 else [0] * len(candidates)


def test_a_small_model_catches_up_in_parts_and_keeps_nothing_of_what_was_wrong(
    tiny: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sampled is often not the likeliest, and that is what a model with the same weights guesses."""
    monkeypatch.setattr(drafter, "MOST_MISSED", 12)
    engine = start(tiny, speculate=f"draft:{folder}", draft_length=4)
    speculation, runner, model = engine.scheduler.speculation, engine.executor, tiny.model
    assert speculation is not None
    assert isinstance(runner, ModelRunner)
    assert isinstance(model, Decoder)
    assert runner.drafter is not None
    speculation.length = Seldom()
    sizes: list[int] = []
    said: list[tuple[list[int], int]] = []
    caught_up: list[bool] = []  # in each step with drafts wanted
    scores, propose = runner.drafter._scores, speculation.proposer.propose

    def count(chunks: Sequence[Chunk]) -> torch.Tensor:
        sizes.append(sum(chunk.count for chunk in chunks if chunk.count > draft_networks.A_FEW))
        return scores(chunks)

    def listen(wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        drafts = propose(wanted)
        guesser = speculation.proposer
        caught_up.append(guesser.catching_up > 0)
        assert (guesser.spent == guesser.catching_up) == (not any(drafts))
        said.extend((list(one.request.tokens), some[0]) for one, some in zip(wanted, drafts, strict=True) if some)
        return drafts

    monkeypatch.setattr(runner.drafter, "_scores", count)
    monkeypatch.setattr(speculation.proposer, "propose", listen)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=110, ignore_eos=True)
    found = run(engine, [([70 + i, 80, 90], params.clone(seed=i)) for i in range(2)])
    assert 0 < max(sizes) <= 12
    assert len(said) > 10
    assert 0 < sum(caught_up) < len(caught_up)
    assert found.accepted < found.proposed
    for tokens, guess in said:
        row = torch.tensor(tokens)
        hidden = model.hidden_states(row, torch.arange(len(tokens)), WholeTexts(len(tokens))).last
        assert guess == int(model.logits(hidden[-1:]).argmax())


def proposer_of(engine: Engine, network: Any) -> NetworkProposer:
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    return NetworkProposer("test", network, runner.attention, runner.storage, runner.model)


def test_all_layers_are_always_right_and_the_first_not_always(tiny: LoadedModel) -> None:
    work = uneven_work(8)
    plain = run(start(tiny), work)
    engine = start(tiny)
    model = tiny.model
    assert isinstance(model, Decoder)
    engine.scheduler.speculation = SpeculationController(proposer_of(engine, FirstLayers(model, 2)), FixedLength(4))
    all_layers = run(engine, work)
    same(plain, all_layers)
    assert all_layers.proposed == all_layers.accepted > 20
    first = run(start(tiny, speculate="layers:1", draft_length=2), work)
    same(plain, first)
    assert first.proposed > first.accepted


def test_with_8_bit_weights_all_of_it_is_the_same(folder: Path, draft: Path) -> None:
    """There, all layers are one kernel, which must be told to do fewer of them; and the head is rounded, too."""
    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    model = rounded.model
    assert isinstance(model, Decoder)
    work = uneven_work(6)
    plain = run(start(rounded), work)
    engine = start(rounded)
    engine.scheduler.speculation = SpeculationController(proposer_of(engine, FirstLayers(model, 2)), FixedLength(3))
    all_layers = run(engine, work)
    same(plain, all_layers)
    assert all_layers.proposed == all_layers.accepted > 10
    for speculate in ("layers:1", f"draft:{draft}"):
        some = run(start(rounded, speculate=speculate, draft_length=2), work)
        same(plain, some)
        assert some.proposed > some.accepted


@pytest.mark.parametrize("a_few", [draft_networks.A_FEW, 1])
def test_a_rounded_head_is_one_call_and_says_what_its_parts_say(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, a_few: int
) -> None:
    """All guesses in one call, against one pass for each, in which every part of the head is called by itself. It is
    the same if more than `a_few` tokens are taken in beforehand."""
    monkeypatch.setattr(draft_head, "A_FEW", a_few)
    rounded = load_model(str(folder), EngineConfig(device="cpu", quantization="int8"), progress=False)
    engine = start(rounded, speculate=f"draft:{draft}", draft_length=4)
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    proposer = runner.drafter
    assert proposer is not None
    network = proposer.network
    assert isinstance(network, Head)
    assert network.one_call
    head, guess_at_once = network._head, proposer._guess_at_once
    same_guesses: list[bool] = []
    cut: list[bool] = []  # because the head was not sure enough

    def both_ways(wanted: Sequence[Wanted], chances: Mapping[bool, list[float]]) -> list[list[int]]:
        lengths = [1 + index % 4 for index in range(len(wanted))]  # not in falling order
        leasts = [0.0, 0.02] * len(wanted)
        wanted = [
            replace(one, length=min(one.length, length), least=least)
            for one, length, least in zip(wanted, lengths, leasts, strict=False)
        ]
        before, one_call = copy.deepcopy(network._ahead), head._fused
        network.one_call, head._fused = False, None
        by_parts = proposer._propose(wanted)
        network.one_call, head._fused = True, one_call
        network._ahead = before
        found = guess_at_once(wanted, chances)
        assert [len(some) for some in found[::2]] == [one.length for one in wanted[::2]]
        cut.extend(len(some) < one.length for some, one in zip(found[1::2], wanted[1::2], strict=True))
        pairs = (zip_longest(*both) for both in zip(found, by_parts, strict=True))
        same_guesses.extend(one == other for some in pairs for one, other in some)
        return found

    monkeypatch.setattr(proposer, "_guess_at_once", both_ways)
    work = uneven_work(14)
    same(run(start(rounded), work), run(engine, work))
    assert len(same_guesses) > 100
    assert any(cut)
    # Embeddings of guesses are kept in fewer bits there, which may decide between two that are as good, or whether
    # one is likely enough: then those behind it differ, too.
    assert sum(same_guesses) >= 0.9 * len(same_guesses), f"{sum(same_guesses)} of {len(same_guesses)}"


def test_a_trained_head_changes_nothing_and_says_what_it_was_trained_to_say(tiny: LoadedModel, draft: Path) -> None:
    work = [(prompt, params.clone(max_tokens=12)) for prompt, params in uneven_work(5)]
    plain = run(start(tiny), work)
    engine = start(tiny, speculate=f"draft:{draft}", draft_length=2, prefix_caching=False, max_prefill_tokens=7)
    said: list[tuple[Request, int, list[int]]] = []
    speculation = engine.scheduler.speculation
    assert speculation is not None
    propose = speculation.proposer.propose

    def listen(wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        drafts = propose(wanted)
        said.extend((one.request, one.request.num_known, list(some)) for one, some in zip(wanted, drafts, strict=True))
        return drafts

    speculation.proposer.propose = listen  # type: ignore[method-assign]
    same(plain, run(engine, work))
    assert len(said) > 20
    model = tiny.model
    assert isinstance(model, Decoder)
    head, ids = load_trainable(draft, model)
    for request, num_known, drafts in said:
        assert drafts == offline_guesses(head, ids, model, list(request.tokens[:num_known]), len(drafts))


def load_trainable(folder: Path, model: Decoder) -> tuple[TrainableHead, torch.Tensor]:
    from safetensors.torch import load_file

    head = TrainableHead(HeadConfig.of(json.loads((folder / "config.json").read_text())), model)
    saved = load_file(folder / "model.safetensors")
    for name, tensor in head.tensors().items():
        tensor.copy_(saved[name])
    return head, saved["token_ids"].long()


@torch.no_grad()
def offline_guesses(head: TrainableHead, ids: torch.Tensor, model: Decoder, tokens: list[int], count: int) -> list[int]:
    """From the whole text at once, without a cache, as in training: a guess from the states of the depth before."""
    guesses: list[int] = []
    previous = None
    for depth in range(count):
        row = torch.tensor(tokens + guesses)
        # The target's states of guesses are not known to the head, and must not matter: it sees its own there.
        hidden, taps = model.hidden_states(row, torch.arange(len(row)), WholeTexts(len(row)))
        assert taps is not None
        features = torch.cat([unit(state) for state in (*taps, hidden)], dim=-1)
        seen: Seen = []
        previous = head.joint(features)[None]
        for _ in range(depth + 1):
            previous = head(model.embed(row)[None], torch.nn.functional.pad(previous[:, :-1], (0, 0, 1, 0)), seen)
        guesses.append(int(ids[model.logits(previous[0, -1:])[0, ids].argmax()]))
    return guesses


def test_training_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    settings = {"texts": 6, "length": 16, "batch": 2, "draft_vocab": 50, "device": "cpu"}
    train_draft(str(folder), tmp_path / "a", TrainSettings(epochs=1, **settings), [], lambda line: None)  # type: ignore[arg-type]
    said: list[str] = []
    train_draft(str(folder), tmp_path / "a", TrainSettings(epochs=2, **settings), [], said.append)  # type: ignore[arg-type]
    assert [line.split(",")[0] for line in said if "step" in line] == [
        f"learning   step {step} of 6" for step in (4, 5, 6)
    ]
    assert not any(" of 6, " in line for line in said if line.startswith("texts")), "the texts are there already"


def test_training_ends_in_time_with_all_that_is_needed(folder: Path, tiny: LoadedModel, tmp_path: Path) -> None:
    settings = TrainSettings(texts=6, length=16, batch=2, epochs=100_000, minutes=0.05, draft_vocab=50, device="cpu")
    said: list[str] = []
    train_draft(str(folder), tmp_path, settings, [], said.append)
    assert any(line.startswith("stopped") for line in said)
    same(run(start(tiny), uneven_work(3)), run(start(tiny, speculate=f"draft:{tmp_path}"), uneven_work(3)))


@pytest.mark.parametrize("speculate", ["layers:2", "draft:nowhere/at/all", "draft:tiny-but-other"])
def test_what_does_not_fit_is_refused(tiny: LoadedModel, tmp_path: Path, speculate: str) -> None:
    if speculate.endswith("other"):
        other = write_tiny_checkpoint(tmp_path / "other", more_special=["<|one|>", "<|two|>", "été"])
        speculate = f"draft:{other}"
    with pytest.raises((InvalidParameter, Exception)) as refusal:
        start_engine(tiny, EngineConfig(device="cpu", kv_memory="1MiB", speculate=speculate))
    assert type(refusal.value).__module__ == "chairlift.errors"


def test_a_head_for_another_model_is_refused(tiny: LoadedModel, draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    (tmp_path / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    with pytest.raises(InvalidParameter, match="trained for another model"):
        start_engine(tiny, EngineConfig(device="cpu", kv_memory="1MiB", speculate=f"draft:{tmp_path}"))


def test_a_head_needs_no_more_state_than_that_of_open_requests(tiny: LoadedModel, draft: Path) -> None:
    engine = start(tiny, speculate=f"draft:{draft}")
    run(engine, uneven_work(4))
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    network = runner.drafter.network
    assert isinstance(network, Head)
    assert not network._ahead
    assert not network._guessed
