"""The cases of `bench shapes` on vLLM: random weights, and vLLM's own defaults wherever the cases do not decide."""

from __future__ import annotations

import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from closed_loop import ReplyWriter, main
from vllm_weights import draw_weights_as_ours


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    # That sampler may be compiled when vLLM starts, and greedy requests do not use it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import SamplingParams

    answer(note="starting")
    llm = _start(job)

    def generate(prompts: list[list[int]], outputs: list[int]) -> float:
        """Seconds from handing all requests over to the end of the last."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        lengths = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False) for count in outputs
        ]
        start_time = time.perf_counter()
        answers = llm.generate(inputs, lengths, use_tqdm=False)
        seconds = time.perf_counter() - start_time
        made = [len(request.outputs[0].token_ids) for request in answers]
        if made != outputs:
            raise RuntimeError(
                f"{sum(made)} tokens in {len(made)} answers, but {sum(outputs)} in {len(outputs)} wanted"
            )
        return seconds

    generate([[1]], [1])
    start_seconds = time.time() - job["started"]
    times: list[float] = []
    for case, warm_up in zip(job["cases"], job["warm_ups"], strict=True):
        answer(note=f"{case['name']}: {len(case['prompts'])} requests")
        generate(warm_up["prompts"], warm_up["outputs"])
        times.append(generate(case["prompts"], case["outputs"]))
        answer(start_seconds=start_seconds, seconds=times)  # now: should a later case fail, these are kept


def _start(job: dict[str, Any]) -> Any:
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        proof = Path(folder) / "drawn"
        draw_weights_as_ours(proof)
        llm = LLM(
            model=job["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            enable_prefix_caching=job["prefix_caching"],
            quantization=job["quantization"],
            kv_cache_dtype=job["kv_dtype"],
            **_installed_kernels(),
        )
        if not proof.exists():
            raise RuntimeError("vLLM drew its own random weights, with which experts are not chosen as by real ones")
    return llm


def _installed_kernels() -> dict[str, Any]:
    """Without flashinfer, which vLLM prefers for gated delta nets on Hopper without looking for it, its own kernels."""
    return {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}


if __name__ == "__main__":
    main("vllm", "vllm", run)
