"""The cases of `bench shapes` on vLLM and on our engine, and loads on our engine, each in a process of its own.

On vLLM: random weights, and its own defaults wherever the cases do not decide. Weights are drawn as ours are
(`models/dummy.py`). vLLM's own random weights are between -0.001 and 0.001, those of norms included, and the same in
every layer. With them all requests of a model with latent attention soon have the same state, so that a batch of any
size reads the experts of one token.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from closed_loop import Arrivals, Program, ReplyWriter, drive, main

SPREAD = 0.02  # Random weights have this standard deviation, as in `models/dummy.py`.


def run_ours(job: dict[str, Any], answer: ReplyWriter) -> None:
    """Our own engine in a process that gives all memory back at its end."""
    from chairlift.errors import ChairliftError, InvalidParameter

    try:
        (_run_cases if "shape" in job else _run_load)(job, answer)
    except InvalidParameter as error:
        answer(parameter=error.parameter, problem=error.problem)
    except ChairliftError as error:
        answer(problem=str(error))


def _run_cases(job: dict[str, Any], answer: ReplyWriter) -> None:
    from chairlift.config import EngineConfig
    from chairlift_lab.common.model_shapes import Cases, run_shape

    imported = time.time() - job["started"]
    cases = Cases(*(job[name] for name in Cases._fields))._replace(config=EngineConfig(**job["config"]))
    done = run_shape(cases, lambda text: answer(note=text))
    answer(**asdict(done), start_seconds=imported + done.ready_seconds)


def _run_load(job: dict[str, Any], answer: ReplyWriter) -> None:
    """A load as a server gets it, so with detokenization."""
    from chairlift.config import EngineConfig
    from chairlift.core.events import RequestAdmitted, RequestFinished, TokenProduced
    from chairlift.core.sampling.params import SamplingParams
    from chairlift.engine.startup import load_engine
    from chairlift.errors import EngineDead

    engine = load_engine(job["model"], EngineConfig(**job["options"]), progress=False).engine
    names: dict[str, str] = {}
    cached: dict[str, int] = {}

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        [request_id] = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=n_out, ignore_eos=True))
        names[request_id] = name

    def poll() -> Arrivals:
        events = engine.step()
        engine.check_alive()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, TokenProduced):
                yield names[event.request_id], [now]
            elif isinstance(event, RequestAdmitted):
                cached[names[event.request_id]] = event.cached_tokens
            elif isinstance(event, RequestFinished) and event.ending.reason.value != "length":
                raise EngineDead(f"a request ended early: {event.ending.reason.value} {event.ending.detail or ''}")

    drive("warm-up", job["warm_up"], job["in_flight"], submit, poll)
    cpu, num_requests = time.process_time(), len(job["requests"])
    served = drive("timed", job["requests"], job["in_flight"], submit, poll, answer, job["times"])
    cached_tokens = [cached.get(f"timed-{index}", 0) for index in range(num_requests)]
    answer(**served, cached_tokens=cached_tokens, cpu_seconds={"engine": time.process_time() - cpu})


def run_vllm(job: dict[str, Any], answer: ReplyWriter) -> None:
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
            # Without flashinfer, which vLLM prefers for gated delta nets on Hopper without looking for it, its own.
            **({} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}),
        )
        if not proof.exists():
            raise RuntimeError("vLLM drew its own random weights, with which experts are not chosen as by real ones")
    return llm


def draw_weights_as_ours(proof: Path) -> None:
    """Replace how vLLM draws weights in this process and those that it forks; the file `proof` shows that it did so."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    from vllm.model_executor.model_loader import dummy_loader

    def draw(layer: Any, _config: Any) -> None:
        proof.touch()
        draw_all(layer)

    dummy_loader.initialize_dummy_weights = draw
    dummy_loader.initialize_single_dummy_weight = _draw


def draw_all(layer: Any) -> None:
    """Draw the weights of a layer and its parts, once: vLLM asks for the model's, and then for those of each part."""
    if getattr(layer, "weights_are_drawn", False):
        return
    for part in layer.modules():
        part.weights_are_drawn = True
    for name, weight in layer.state_dict().items():
        _draw(weight, name)


def _draw(weight: Any, name: str = "") -> None:
    import torch

    if weight.device.type == "meta":  # allocated and drawn later
        return
    if weight.dtype == torch.uint8:  # 4-bit floats, and their scales: powers of two
        if "scale" in name:
            weight.data.fill_(120)
        else:
            weight.data.random_(0, 256)
    elif weight.is_floating_point():
        if weight.dim() < 2 or "scale" in name:  # norms, biases and scales
            weight.data.fill_(1.0)
        else:  # 8-bit floats cannot be drawn, but 16 bits can.
            drawn = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
            weight.data.copy_(drawn.normal_(0.0, SPREAD))


PROGRAMS = {"vllm": Program("vllm", "vllm", run_vllm), "chairlift": Program("chairlift", "chairlift", run_ours)}

if __name__ == "__main__":
    main(PROGRAMS)
