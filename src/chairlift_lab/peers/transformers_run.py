"""The same workload on the continuous batching of Hugging Face transformers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import EngineDead
from chairlift_lab.common.engines import Measurement, TokenProgress
from chairlift_lab.common.workload import Workload

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 32
# Its own default depends on the size of a GPU. On a CPU, larger steps are no faster than this.
MAX_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TransformersSetup:
    checkpoint: Path  # a folder, or a .gguf file
    dtype: torch.dtype
    device: torch.device
    max_batch_tokens: int
    max_batch_requests: int


def measure_transformers(setup: TransformersSetup, workload: Workload, advance: TokenProgress) -> Measurement:
    with _quietly():
        model = _load(setup)
        with _manager(model, setup, workload) as manager:
            _run(manager, "warm-up", workload.warm_up(), lambda tokens: None)
            return _run(manager, "timed", workload, advance)


def _load(setup: TransformersSetup) -> Any:
    from transformers import AutoModelForCausalLM

    path, extra = setup.checkpoint, {}
    if path.suffix == ".gguf":
        path, extra = path.parent, {"gguf_file": path.name}
    options = {"dtype": setup.dtype, "attn_implementation": "sdpa", "local_files_only": True}
    with redirect_stderr(StringIO()):  # the progress bar of the GGUF reader cannot be turned off
        return AutoModelForCausalLM.from_pretrained(path, **options, **extra).to(setup.device).eval()


@contextmanager
def _manager(model: Any, setup: TransformersSetup, workload: Workload) -> Iterator[Any]:
    """The manager below `model.generate_batch`, which itself has one `max_new_tokens` for all requests."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    slots = min(setup.max_batch_requests, len(workload.requests))
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=slots * (-(-workload.longest // PAGE_SIZE) + 1),  # enough for all requests at once
        max_batch_tokens=setup.max_batch_tokens,
        max_requests_per_batch=slots,
        allow_block_sharing=False,  # random prompts have no common prefixes, so searching for them only costs time
    )
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)


def _run(manager: Any, label: str, workload: Workload, advance: TokenProgress) -> Measurement:
    advance(0)
    start_time = time.perf_counter()
    for index, request in enumerate(workload.requests):
        manager.add_request(
            list(request.prompt_ids),
            request_id=f"{label}-{index}",
            max_new_tokens=request.n_out,
            record_timestamps=True,
            eos_token_id=-1,
        )
    outputs: dict[str, Any] = {}
    num_tokens = 0
    while len(outputs) < len(workload.requests):
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise EngineDead("the continuous batching of transformers stopped; run with --engines without it")
            continue
        outputs[output.request_id] = output
        num_tokens += len(output.generated_tokens)
        advance(num_tokens)
    seconds = time.perf_counter() - start_time
    times = []
    for index, request in enumerate(workload.requests):
        output = outputs[f"{label}-{index}"]
        if output.error or len(output.generated_tokens) != request.n_out:
            problem = output.error or f"{len(output.generated_tokens)} tokens instead of {request.n_out}"
            raise EngineDead(f"transformers failed on request {index}: {problem}")
        times.append([moment - start_time for moment in output.timestamps])
    return Measurement(seconds, workload.input_tokens, times)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings, the log and the progress bars of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
