"""Sampling parameters from outside the package: one file each, applied on every runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.attention.backends.base import choose_backend
from chairlift.attention.paged.gpu import PagedGPUAttention
from chairlift.core.budgets.base import FixedBudget
from chairlift.core.events import TokenProduced
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.policies.base import ContinuousPolicy
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidParameter
from chairlift.loading.request_defaults import RequestDefaults
from chairlift.models import build_model
from chairlift.models.base import CausalLM
from chairlift.models.dummy import dummy_tensors
from chairlift.runner.base import ModelRunner
from chairlift.runner.cpu import CPURunner
from chairlift.runner.gpu.runner import GPURunner
from chairlift.runner.gpu.shapes import StepSizes
from chairlift.runner.memory import allocate_storage
from chairlift.sampling.draw import filter_probabilities, filters_of
from chairlift.sampling.sampler import Sampler
from chairlift.server.openai.types import CompletionRequest
from chairlift.server.wire.messages import Submit, decode_to_engine, encode
from chairlift.text.tokenizer import Tokenizer
from tests.extending.toys import no_repeat_ngram_size, top_a
from tests.kernels.tiny_config import CONFIG
from tests.text import backends
from tests.tiny import write_tiny_checkpoint

PAGE = Path(__file__).parents[2] / "docs/extending/sampling-parameter.md"
PROMPT = [5, 6, 7, 8, 6]
SIZE = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
NO_REPEAT = GREEDY.clone(extra_args={"no_repeat_ngram_size": SIZE})


def has_repeated_ngram(tokens: list[int]) -> bool:
    ngrams = [tuple(tokens[first : first + SIZE]) for first in range(len(tokens) - SIZE + 1)]
    return len({*ngrams}) < len(ngrams)


@pytest.mark.parametrize("toy", [no_repeat_ngram_size, top_a])
def test_the_page_shows_the_toy(toy: object) -> None:
    source = Path(toy.__file__).read_text()  # type: ignore[attr-defined]
    assert f"```python\n{source}```" in PAGE.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram", "draft_length": 3}])
def test_generate_applies_an_edit_to_the_requests_that_set_it(folder: str, options: dict[str, Any]) -> None:
    llm = LLM(folder, device="cpu", kv_memory="2MiB", progress=False, **options)
    prompts = [{"prompt_token_ids": PROMPT}] * 3
    params = [one.clone(logit_bias=dict.fromkeys(range(10, 14), 50.0)) for one in (GREEDY, NO_REPEAT, GREEDY)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    plain, edited, again = [output.outputs[0].token_ids for output in outputs]
    assert has_repeated_ngram(PROMPT + plain)
    assert not has_repeated_ngram(PROMPT + edited)
    assert again == plain


@pytest.fixture(scope="module")
def model() -> CausalLM:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return build_model(CONFIG, dummy_tensors(CONFIG, device), dtype=torch.float32, device=device)


def generate(model: CausalLM, params: Sequence[SamplingParams], *, gpu: bool) -> list[list[int]]:
    storage = allocate_storage(model.attention_layers, 32, 8, model.dtype, model.device)
    if gpu:
        runner: ModelRunner = GPURunner(
            model, PagedGPUAttention(), storage, StepSizes(requests=4, tokens=32, context=64)
        )
    else:
        attention = choose_backend("bursted", model.attention_layers, model.device, model.dtype)
        runner = CPURunner(model, attention, storage)
    scheduler = Scheduler(KVCache(32, 8), FixedBudget.of(32, 24), ContinuousPolicy(), 4)
    tokenizer = Tokenizer(backends.byte_level())
    engine = Engine(scheduler, runner, tokenizer, vocab_size=model.vocab_size, max_model_len=64, seed=1)
    outputs: dict[str, list[int]] = {engine.submit(PROMPT, one)[0]: [] for one in params}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                outputs[event.request_id].append(event.token)
    assert engine.fatal is None, engine.fatal
    return [*outputs.values()]


def test_the_gpu_runner_gives_such_requests_to_the_host(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    if model.device.type == "cpu":
        monkeypatch.setattr("chairlift.kernels.triton.decode.PROGRAMS", 16)  # the interpreter runs one after the other
    on_host: list[str] = []
    add = Sampler.add

    def add_and_record(sampler: Sampler, request_id: str, *args: Any, **options: Any) -> None:
        on_host.append(request_id)
        add(sampler, request_id, *args, **options)

    monkeypatch.setattr(Sampler, "add", add_and_record)
    params = [GREEDY.clone(max_tokens=6), NO_REPEAT.clone(max_tokens=6)]
    plain, edited = generate(model, params, gpu=True)
    assert len(on_host) == 1
    assert has_repeated_ngram(PROMPT + plain)
    assert not has_repeated_ngram(PROMPT + edited)
    assert generate(model, params, gpu=False) == [plain, edited]


def test_only_parameters_with_device_support_are_sampled_on_the_device() -> None:
    assert NO_REPEAT.needs_host
    assert SamplingParams(extra_args={"top_a": 0.3}).needs_host
    assert not SamplingParams(extra_args={"no_repeat_ngram_size": 0}).needs_host


def test_a_filter_zeroes_what_is_below_its_floor() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05]])
    params = [SamplingParams(extra_args={"top_a": 0.8}), SamplingParams()]
    filter_probabilities(weights, [filters_of(one) for one in params])
    assert (weights > 0).tolist() == [[True, True, False, False], [True] * 4]  # 0.8 * 0.5 ** 2 = 0.2


def test_values_are_checked_when_the_parameters_are_created() -> None:
    with pytest.raises(InvalidParameter, match="no_repeat_ngram_size: must be an integer of at least 0 and at most 16"):
        SamplingParams(extra_args={"no_repeat_ngram_size": 17})
    with pytest.raises(InvalidParameter, match="no_such_thing: is not a sampling parameter"):
        SamplingParams(extra_args={"no_such_thing": 1})
    with pytest.raises(InvalidParameter, match="extra_args: top_k is a parameter of its own; pass it by name"):
        SamplingParams(extra_args={"top_k": 1})
    with pytest.raises(InvalidParameter, match="top_a: is not supported with beam_width"):
        SamplingParams(beam_width=2, extra_args={"top_a": 0.5})


def test_a_server_takes_it_as_a_field_of_the_body_and_sends_it_to_the_engine() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "p", "top_p": 0.5, "top_a": 0.25})
    served: Any = SimpleNamespace(names=("m",), defaults=RequestDefaults())
    params = body.params(served)
    assert (params.top_p, params.extra_args) == (0.5, {"top_a": 0.25})
    sent = decode_to_engine(encode(Submit("r", [1], params, None, "")))
    assert isinstance(sent, Submit)
    assert sent.params == params
    with pytest.raises(InvalidParameter, match="top_a: must be a number"):
        CompletionRequest.model_validate({"model": "m", "prompt": "p", "top_a": "much"}).params(served)
    with pytest.raises(ValueError, match="no_such_thing"):
        CompletionRequest.model_validate({"model": "m", "prompt": "p", "no_such_thing": 1})
