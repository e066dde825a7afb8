"""Options of vLLM and llama.cpp that no command has, and what takes their place: the rows of docs/coming-from.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ONE_GPU = "is not supported: a model must fit one GPU"
_ALWAYS = "is not needed: it is always on"

ADVICE: Mapping[str, str] = {
    # vLLM
    "--tensor-parallel-size": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU,
    "--data-parallel-size": "is `chairlift cluster serve` with --replicas here",
    "--enable-lora": "is not needed: name adapters with --lora NAME=PATH, or leave room with --max-loras",
    "--limit-mm-per-prompt": "is not supported: models take text only",
    "--cpu-offload-gb": "is not supported: take fewer bits (--quantization), or --device cpu",
    "--trust-remote-code": "is not supported: code of models is never run",
    "--speculative-config": "is --speculate here: --speculate ngram or --speculate draft:PATH",
    "--tool-call-parser": "is --tool-format here, which is detected from the chat template",
    "--enable-auto-tool-choice": "is not needed: --tool-format is detected from the chat template",
    "--allowed-origins": "is --cors-origin here",
    "--swap-space": "is --preemption swap with --swap-memory here",
    # llama.cpp
    "-hf": "is not needed: give the id in place of the file",
    "-c": "is --max-model-len here, of one request and not divided among slots",
    "--ctx-size": "is --max-model-len here, of one request and not divided among slots",
    "-np": "is --max-batch-requests here; the KV cache is shared",
    "--parallel": "is --max-batch-requests here; the KV cache is shared",
    "-b": "is --max-batch-tokens here",
    "--batch-size": "is --max-batch-tokens here",
    "-ub": "is --max-batch-tokens here",
    "-t": "is --threads here",
    "-ngl": "is --device cuda or --device cpu here: all layers or none",
    "--n-gpu-layers": "is --device cuda or --device cpu here: all layers or none",
    "-ctk": "is --kv-dtype here",
    "-ctv": "is --kv-dtype here",
    "-fa": _ALWAYS,
    "-cb": _ALWAYS,
    "-a": "is --served-model-name here",
    "--alias": "is --served-model-name here",
    "--jinja": "is not needed: templates are always Jinja; --chat-template names another one",
    "--chat-template-file": "is --chat-template here",
    "--temp": "is --temperature here",
    "--repeat-penalty": "is --repetition-penalty here",
    "-n": "is --max-tokens here",
    "-s": "is --seed here",
    "-md": "is --speculate draft:PATH here",
    "--draft-max": "is --draft-length here",
    "--metrics": _ALWAYS,
    "--slots": _ALWAYS,
    "--embedding": _ALWAYS,
    "--reranking": _ALWAYS,
    "--no-webui": "is --no-dashboard here",
    "--reasoning-format": "is --reasoning-parser here",
    "--reasoning-budget": "is `thinking_token_budget` in a request here; --reasoning-parser finds reasoning",
    "--grammar": "is `grammar` in a request here",
    "--json-schema": "is `json_schema` in a request here",
    "--mmproj": "is not supported: models take text only",
    "-sm": _ONE_GPU,
    "-ts": _ONE_GPU,
}


def advice_for(option: str, arguments: Iterable[str]) -> str | None:
    """What to tell a user whose option is unknown; `arguments` have it whole where the parser read `-np` as `-n`."""
    if not option.startswith("--"):
        option = next((each for each in arguments if each.startswith(option)), option)
    name = option.partition("=")[0]
    return f"{name} {ADVICE[name]} (docs/coming-from.md)" if name in ADVICE else None
