"""A stub of the package vllm: answers at once, and behaves as FAKE_VLLM says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def _dummy_loader() -> ModuleType:
    """The stub's `model_executor.model_loader.dummy_loader`, whose functions are replaced."""
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].dummy_loader = ModuleType("dummy_loader")  # type: ignore[attr-defined]
    return sys.modules[name].dummy_loader  # type: ignore[attr-defined,no-any-return]


DUMMY_LOADER = _dummy_loader()


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    ignore_eos: bool
    max_tokens: int
    detokenize: bool


class LLM:
    def __init__(self, **options: Any) -> None:
        print("Loading weights")  # must not disturb the answers on standard output
        if os.environ.get("FAKE_VLLM") == "dies":
            print("torch.OutOfMemoryError: no room for 3 blocks", file=sys.stderr)
            print("\n".join(f"frame {number}" for number in range(50)), file=sys.stderr)
            raise RuntimeError("the engine did not start")
        self._log("options", options | {"config": json.loads((Path(options["model"]) / "config.json").read_text())})
        self._log("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
        if os.environ.get("FAKE_VLLM") != "draws its own weights":
            DUMMY_LOADER.initialize_dummy_weights(SimpleNamespace(modules=list, state_dict=dict), None)

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[Any]:
        assert not use_tqdm
        together = zip(prompts, params, strict=True)
        self._log("asked", [[prompt["prompt_token_ids"], vars(how)] for prompt, how in together])
        short = os.environ.get("FAKE_VLLM") == "is short" and len(prompts) > 1
        if os.environ.get("FAKE_VLLM") == "dies of prompts" and len(prompts[0]["prompt_token_ids"]) > 60:
            raise RuntimeError("too long a prompt")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * (how.max_tokens - short))]) for how in params]

    def _log(self, kind: str, content: Any) -> None:
        with open(os.environ["FAKE_VLLM_LOG"], "a", encoding="utf-8") as log:
            log.write(json.dumps([kind, content]) + "\n")
