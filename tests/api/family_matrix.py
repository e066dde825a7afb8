"""Every causal model type of transformers as a tiny random checkpoint, through the whole engine.

`python -m tests.api.family_matrix` prints what happens to each; `--write` also records it for docs/models.md. New
native families and model types of transformers are found by themselves. Tiny configs: tests/models/tiny_configs.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chairlift.config import EngineConfig
from chairlift.core.events import DraftsVerified, Event, RequestAdmitted, RequestPreempted, TokenProduced
from chairlift.core.integrity import check_accounting, check_quiescent
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.memory_plan import bytes_per_token
from chairlift.engine.startup import LoadedModel, start_engine
from chairlift.errors import ChairliftError, UnsupportedModel
from chairlift.models import describe, is_native
from chairlift.text.tokenizer import Tokenizer
from tests.comparison import compare
from tests.models.checkpoints import load, make_reference, prompts, save
from tests.models.tiny_configs import tiny_config
from tests.tiny import byte_level_tokenizer

RESULTS = Path(__file__).parents[2] / "docs" / "models.json"
NEW_TOKENS = 10
NUM_STATES = 40  # slots of recurrent layers
LONGEST = 75
MOST_CHECKED = 2000  # blocks; without attention there are as many as any sequences could need
CROWD = 12  # requests of which some are preempted
LATE_AFTER = 4  # steps
REPEATING = [5, 60, 7, 180] * 6  # n-grams to draft from

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_batch_requests": 1, "prefix_caching": False},
    "together": {"prefix_caching": False},
    "chunks of 1": {"max_prefill_tokens": 1, "prefix_caching": False},
    "chunks of 7": {"max_prefill_tokens": 7, "block_size": 4, "prefix_caching": False},
    "chunks of 64": {"max_prefill_tokens": 64, "prefix_caching": False},
    "warm prefix": {"block_size": 4},
    "preempted": {
        "num_blocks": 13,
        "block_size": 4,
        "max_batch_tokens": 16,
        "max_batch_requests": CROWD,
        "prefix_caching": False,
    },
    "ngram drafts": {"speculate": "ngram", "draft_length": 4, "block_size": 4},
    "n = 3": {"block_size": 4},
}

# Without attention there are no blocks to run out of: another tenant displaces some requests.
DISPLACED: dict[str, Any] = {"order": "fair", "max_batch_requests": CROWD // 3, "prefix_caching": False}

# Model types without a tiny text model: they belong to models of other kinds, or cannot be built here.
OTHER_KINDS: dict[str, str] = {
    "blt": "reads bytes by three models",
    "cohere_compass_text": "its default rotation cannot be built",
    "dbrx": "its default rotation cannot be built",
    "dots3_note": "its default config cannot be built; its text part is dots3_note_text",
    "emu3": "images",
    "fuyu": "images",
    "gemma3": "images; its text part is gemma3_text",
    "gemma3n": "images and sound; its text part is gemma3n_text",
    "gemma4": "images and sound; its text part is gemma4_text",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified": "images and sound; its text part is gemma4_unified_text",
    "gemma4_unified_assistant": "drafts for another model",
    "git": "images",
    "got_ocr2": "images",
    "llama4": "images; its text part is llama4_text",
    "mllama": "images",
    "moshi": "sound",
    "moss_transcribe_diarize": "sound",
    "musicgen": "sound",
    "musicgen_melody": "sound",
    "phi4_multimodal": "images and sound",
    "qwen3_5": "images; its text part is qwen3_5_text",
    "qwen3_5_moe": "images; its text part is qwen3_5_moe_text",
    "qwen4_exp": "its default config cannot be built",
    "qwen4_exp_text": "its default config cannot be built",
    "reformer": "its default config cannot be built",
    "trocr": "images",
    "whisper": "sound",
    "xlstm": "its default config cannot be built",
    "zamba": "its default config cannot be built",
}


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """What happens to a model type."""

    path: str  # "native", "fallback" or "refused"
    features: tuple[str, ...] = ()  # the settings in which its tokens equal those of transformers
    problem: str | None = None  # why it is refused, or what went wrong


def model_types() -> list[str]:
    """All causal model types of the installed transformers that have a tiny text model, and the native ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - OTHER_KINDS.keys())


def run_family(model_type: str, folder: Path, settings: Sequence[str] = tuple(SETTINGS)) -> FamilyResult:
    """Compare a model type with transformers in these settings; a difference or a crash raises."""
    reference = make_reference(tiny_config(model_type))
    config = save(reference, folder)
    path = "native" if is_native(config) else "fallback"
    try:
        describe(config)
    except UnsupportedModel as refusal:
        reason = str(refusal).partition(". Supported")[0].partition("cannot run: ")[2] or str(refusal)
        return FamilyResult("refused", problem=reason)
    loaded = LoadedModel(model_type, load(folder), Tokenizer(byte_level_tokenizer()), frozenset())
    texts = [REPEATING, *(tokens.tolist() for tokens in prompts(1, 9, 26, LONGEST))]
    expected = [_greedy(reference, prompt) for prompt in texts]
    assert len({token for tokens in expected for token in tokens}) > 8, "the tokens vary too little to reveal errors"
    for setting in settings:
        _run_setting(setting, loaded, reference, texts, expected)
    return FamilyResult(path, tuple(settings))


def _run_setting(
    setting: str, loaded: LoadedModel, reference: Any, texts: list[list[int]], expected: list[list[int]]
) -> None:
    """Run the prompts in a setting; raises if tokens differ, or if the setting had no effect."""
    crowded = setting == "preempted"
    displaced = crowded and not loaded.model.attention_layers
    options = DISPLACED if displaced else SETTINGS[setting]
    started = start_engine(loaded, _engine_config(loaded, dict(options)))
    if crowded:
        texts, expected = _crowd(texts, expected, started.memory.num_tokens)
    for _ in range(2 if setting == "warm prefix" else 1):
        outputs, events = _run(
            started.engine, texts, n=3 if setting == "n = 3" else 1, num_late=CROWD // 3 if displaced else 0
        )
        for prompt, wanted, several in zip(texts, expected, outputs, strict=True):
            for actual in several:
                compare(reference, prompt, wanted, actual)  # raises unless it is equal, or a tie
    if setting == "warm prefix":
        assert any(event.cached_tokens for event in events if isinstance(event, RequestAdmitted)), (
            "no prefix was reused"
        )
    if setting == "ngram drafts":
        assert any(isinstance(event, DraftsVerified) for event in events), "no draft token was proposed"
    is_short_of_blocks = crowded and not any(layer.window for layer in loaded.model.attention_layers)
    was_preempted = any(isinstance(event, RequestPreempted) for event in events)
    assert was_preempted or not is_short_of_blocks, "no request was preempted"


def _crowd(
    texts: list[list[int]], expected: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The two longest prompts that fit into the memory, so often that they do not fit together."""
    fitting = [pair for pair in zip(texts, expected, strict=True) if len(pair[0]) + NEW_TOKENS <= num_tokens]
    longest = sorted(fitting, key=lambda pair: -len(pair[0]))[:2]
    crowd = CROWD // len(longest) * longest
    return [prompt for prompt, _ in crowd], [tokens for _, tokens in crowd]


@torch.inference_mode()
def _greedy(reference: Any, prompt: list[int]) -> list[int]:
    """Greedy continuation by transformers, without its cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _engine_config(loaded: LoadedModel, options: dict[str, Any]) -> EngineConfig:
    """An engine config with `num_blocks` expressed as `kv_memory`, which recurrent layers share."""
    block_size, num_blocks = options.get("block_size", 16), options.pop("num_blocks", 100)
    kv_bytes = num_blocks * block_size * bytes_per_token(loaded.model.attention_layers, torch.float32)
    state_bytes = NUM_STATES * sum(layer.num_bytes for layer in loaded.model.recurrent_layers)
    return EngineConfig(
        device="cpu",
        dtype="float32",
        kv_memory=kv_bytes + state_bytes,
        state_memory=state_bytes or None,
        **options,
    )


def _run(engine: Engine, texts: list[list[int]], *, n: int, num_late: int) -> tuple[list[list[list[int]]], list[Event]]:
    """All prompts -> the tokens of each prompt's completions, and all events.

    The last `num_late` prompts are those of another tenant, and come after some steps; all others come at once.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=n)
    on_time = len(texts) - num_late
    groups = [engine.submit(prompt, params) for prompt in texts[:on_time]]
    tokens: dict[str, list[int]] = {request_id: [] for group in groups for request_id in group}
    events: list[Event] = []
    steps = 0
    while engine.has_work:
        steps += 1
        if steps == LATE_AFTER:
            groups += [engine.submit(prompt, params, tenant="late") for prompt in texts[on_time:]]
            tokens |= {request_id: [] for group in groups[on_time:] for request_id in group}
        for event in engine.step():
            events.append(event)
            if isinstance(event, TokenProduced):
                tokens[event.request_id].append(event.token)
        if engine.scheduler.kv.pool.num_blocks <= MOST_CHECKED:
            check_accounting(engine.scheduler)
    assert engine.fatal is None
    check_quiescent(engine.scheduler)
    return [[tokens[request_id] for request_id in group] for group in groups], events


def recorded(model_type: str, result: FamilyResult) -> dict[str, Any]:
    """A result as docs/models.json holds it, with the sizes that transformers gives the family by default."""
    from transformers import CONFIG_MAPPING

    found: dict[str, Any] = {"path": result.path}
    if not result.features:
        return found | {"reason": result.problem}
    found["features"] = list(result.features)
    try:
        info = describe(CONFIG_MAPPING[model_type]().to_dict())
    except ChairliftError:  # some defaults are not a whole model
        return found
    return found | {
        "num_parameters": info.num_parameters,
        "kv_bytes_per_token": bytes_per_token(info.attention_layers, torch.bfloat16),
        "state_bytes": sum(layer.num_bytes for layer in info.recurrent_layers),
    }


def _write(model_type: str, result: FamilyResult) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[model_type] = recorded(model_type, result)
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these")
    parser.add_argument("--write", action="store_true", help=f"record the results in {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, FamilyResult] = {}
    for model_type in arguments.model_types or model_types():
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = run_family(model_type, Path(folder))
            except Exception as error:  # the table shows what is wrong with one, and goes on
                result = FamilyResult("wrong", problem=f"{type(error).__name__}: {error}")
        results[model_type] = result
        if arguments.write:
            _write(model_type, result)
        print(f"{model_type:<24} {result.path:<9} {result.problem or ', '.join(result.features)}"[:180], flush=True)
    for path in ("native", "fallback", "refused", "wrong"):
        print(f"{path:<9} {sum(result.path == path for result in results.values())}")


if __name__ == "__main__":
    main()
