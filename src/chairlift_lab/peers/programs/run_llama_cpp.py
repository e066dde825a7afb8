"""A job on llama.cpp's server, inside this process and without HTTP: the wheel `xllamacpp`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from closed_loop import ReplyWriter, main, run_job


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    server = _load(job)
    arrived: SimpleQueue[tuple[str, list[float]] | Exception] = SimpleQueue()
    clients = ThreadPoolExecutor(job["concurrency"])  # a call returns when its request has ended

    def generate(name: str, prompt: Sequence[int], n_out: int) -> None:
        counted = 0

        def take(chunk: dict[str, Any]) -> None:
            # A chunk may hold several tokens: half a character is held back until the other half arrives.
            nonlocal counted
            now = time.perf_counter()
            if "error" in chunk:
                arrived.put(RuntimeError(f"request {name}: {chunk['error']}"))
            elif (total := chunk.get("timings", {}).get("predicted_n", counted)) > counted:
                arrived.put((name, [now] * (total - counted)))
                counted = total

        try:
            server.handle_completions(_body(prompt, n_out), take)
            if counted != n_out:
                arrived.put(RuntimeError(f"request {name}: {counted} tokens instead of {n_out}"))
        except Exception as error:
            arrived.put(error)

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        clients.submit(generate, name, prompt, n_out)

    def poll() -> list[tuple[str, list[float]]]:
        arrival = arrived.get()
        if isinstance(arrival, Exception):
            raise arrival
        return [arrival]

    run_job(job, answer, submit, poll)


def _body(prompt: Sequence[int], n_out: int) -> dict[str, Any]:
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
    options = {"ignore_eos": True, "cache_prompt": False, "stream": True, "timings_per_token": True}
    return {"prompt": list(prompt), "n_predict": n_out} | greedy | options


def _load(job: dict[str, Any]) -> Any:
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = job["model"]
    params.n_parallel = job["concurrency"]
    params.n_ctx = job["concurrency"] * (-(-(job["longest"] + 1) // 256) * 256)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_ram_mib = 0  # a cache of earlier prompts
    params.cache_idle_slots = False
    return Server(params)


if __name__ == "__main__":
    main("xllamacpp", "xllamacpp", run)
