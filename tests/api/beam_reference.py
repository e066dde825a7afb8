"""Beam search of a model compared with transformers' `generate(num_beams=…)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.events import RequestFinished, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.startup import LoadedModel, start_engine

Found = list[tuple[list[int], float]]


def search(model: LoadedModel, prompts: list[list[int]], params: SamplingParams) -> list[Found]:
    """Search for all prompts at once, checking the block accounting after every step."""
    engine = start_engine(model, EngineConfig(device="cpu", dtype="float32", max_batch_requests=32)).engine
    ids = [engine.submit(prompt, params) for prompt in prompts]
    tokens: dict[str, list[int]] = {one: [] for some in ids for one in some}
    scores: dict[str, float] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenProduced):
                tokens[event.request_id].append(event.token)
            elif isinstance(event, RequestFinished) and event.request_id in tokens:
                assert event.score is not None
                scores[event.request_id] = event.score
        check_accounting(engine.scheduler)
    check_quiescent(engine.scheduler)
    return [[(tokens[one], scores[one]) for one in some] for some in ids]


def reference(hf: Any, prompt: list[int], params: SamplingParams, eos: list[int]) -> Found:
    found = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=eos,
        pad_token_id=eos[0],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [row.tolist() for row in found.sequences[:, len(prompt) :]]
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def check_beams(model: LoadedModel, hf: Any, texts: list[str], width: int, new: int) -> None:
    params = SamplingParams(beam_width=width, n=width, max_tokens=new)
    prompts = [model.tokenizer.encode(text) for text in texts]
    eos = sorted(model.eos_ids)
    for prompt, found in zip(prompts, search(model, prompts, params), strict=True):
        for (tokens, score), (best, best_score) in zip(found, reference(hf, prompt, params, eos), strict=True):
            assert tokens == best[: len(tokens)]
            assert set(best[len(tokens) :]) <= {eos[0]}
            assert score == pytest.approx(best_score, abs=2e-4)
