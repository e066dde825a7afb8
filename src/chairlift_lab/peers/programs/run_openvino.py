"""A job on the continuous batching of OpenVINO GenAI, from a folder that optimum-cli exported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from closed_loop import ReplyWriter, main, run_job

MAX_BATCH_TOKENS = 512  # more than its default, which is slower with prompts of this length
KV_GIGABYTES = 2


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = job["concurrency"]
    scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
    scheduler.cache_size = KV_GIGABYTES
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": job["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)
    handles: dict[str, Any] = {}
    serial = 0

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        nonlocal serial
        serial += 1
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = n_out
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles[name] = pipeline.add_request(serial, ids, config)

    def poll() -> list[tuple[str, list[float]]]:
        pipeline.step()
        now = time.perf_counter()
        arrivals = []
        for name, handle in list(handles.items()):
            if handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                arrivals.append((name, [now] * tokens))
            elif (status := handle.get_status()) == genai.GenerationStatus.FINISHED:
                del handles[name]
            elif status != genai.GenerationStatus.RUNNING:
                raise RuntimeError(f"request {name}: {status}")
        return arrivals

    run_job(job, answer, submit, poll)


if __name__ == "__main__":
    main("openvino_genai", "openvino-genai", run)
