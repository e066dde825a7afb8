"""Writes docs/models.md: `python -m chairlift_lab.report.models_page docs/models.json > docs/models.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INTRODUCTION = """\
# Models

This page is generated (`make models-page`) from `docs/models.json`, which `python -m tests.api.family_matrix --write`
records; do not edit it.

A model runs *natively*, on the decoder of this package, or by the *fallback*: on transformers' code, with our attention
in place of theirs, slower and without fused layers, `batch_invariant`, draft heads, and fp8 or 4-bit weights. What
cannot run is refused with the reason before weights are loaded. The family is the `model_type` of `config.json`. To ask
about one model, and for the memory that it needs:

```
chairlift models --check Qwen/Qwen3-8B          # an id of the hub, of which no weights are fetched
chairlift models --check path/to/config.json    # or a folder, or a GGUF file; --json prints an object
```

Of a GGUF file the tokenizer is built, too, since a file only names the rule by which text is split (its pre-tokenizer):
the answer says which, and a name that is not supported is refused as it is at a start. The rules are those of
llama.cpp, except where the `tokenizer.json` that the model was published with does otherwise: `falcon3` splits
punctuation and single digits as Falcon 3 does, `deepseek-llm` single digits, and `qwen2` and `command-r` compose
characters (NFC) first.

Of models that also read images or sound, the text part runs: where a config has a `text_config` (`llm_config`,
`language_config`, `thinker_config`), that is the config, and its `model_type` the family. Tested beside whole models
of transformers: Mistral 3, LLaVA, InternVL, Idefics 3, SmolVLM, Aria, Qwen2-VL, Qwen2.5-VL, Qwen3-VL with and without
experts, GLM-4.1V, GLM-4.5V, Kimi K2.5, Gemma 3 and Llama 4; Gemma 3n by its text part. Images in a request are refused.

Each family is tested as a tiny random checkpoint: in float32 its greedy tokens equal those of transformers in these
settings.

| tested | meaning |
|---|---|
| alone, together | one request at a time; all in one batch |
| chunks of 1, 7, 64 | prompts in steps of so many tokens |
| warm prefix | the second time, with what the first time left in the prefix cache |
| preempted | too little memory for all requests, which are set back and continue |
| ngram drafts | speculation with n-grams of the text |
| n = 3 | three completions that share their prompt |

Weights, and bytes of the KV cache per token in bfloat16, are those of the sizes that transformers gives a family by
default, often those of a published model. *State* is what recurrent layers keep per sequence, whatever its length.
"""
ALL_SETTINGS = 9


def models_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page for results by model type."""
    parts = [INTRODUCTION]
    for path, title in (("native", "Native families"), ("fallback", "By the fallback")):
        families = {name: each for name, each in results.items() if each["path"] == path}
        lines = [["family", "names", "tested", "weights", "KV bytes per token", "state"], ["---"] * 6]
        lines += [_line(name, each) for name, each in families.items()]
        parts.append(f"## {title}\n\n{len(families)} families.\n\n{_table(lines)}")
    refused = {name: each["reason"] for name, each in results.items() if each["path"] == "refused"}
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    lines = [["reason", "families"], ["---"] * 2, *([reason, ", ".join(names)] for reason, names in reasons.items())]
    return "\n".join([*parts, f"## Refused\n\n{len(refused)} families.\n\n{_table(lines)}"])


def _line(name: str, result: Mapping[str, Any]) -> list[str]:
    from chairlift.models.families import FAMILIES

    title = FAMILIES[name].title if name in FAMILIES else ""
    tested = "all" if len(result["features"]) == ALL_SETTINGS else ", ".join(result["features"])
    weights, kv, state = (result.get(key) for key in ("num_parameters", "kv_bytes_per_token", "state_bytes"))
    return [
        f"`{name}`",
        title,
        tested,
        "" if weights is None else _billions(weights),
        "" if kv is None else f"{kv:,}",
        "" if not state else f"{state / 2**20:.1f} MiB",
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _table(lines: list[list[str]]) -> str:
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


if __name__ == "__main__":
    print(models_page(json.loads(Path(sys.argv[1]).read_text())), end="")
