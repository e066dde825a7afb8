"""A job on the continuous batching of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from closed_loop import ReplyWriter, main, run_job

PAGE_SIZE = 32
MAX_BATCH_TOKENS = 512  # its default depends on the size of a GPU


def run(job: dict[str, Any], answer: ReplyWriter) -> None:
    manager = _manager(job, _load(job))
    manager.start()

    def submit(name: str, prompt: Sequence[int], n_out: int) -> None:
        ending = {"max_new_tokens": n_out, "eos_token_id": -1}
        manager.add_request(list(prompt), request_id=name, record_timestamps=True, **ending)

    def poll() -> list[tuple[str, list[float]]]:
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


def _load(job: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    path, extra = Path(job["model"]), {}
    if path.suffix == ".gguf":
        path, extra = path.parent, {"gguf_file": path.name}
    options = {"dtype": getattr(torch, job["dtype"]), "attn_implementation": "sdpa", "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(path, **options, **extra).eval()


def _manager(job: dict[str, Any], model: Any) -> Any:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=job["concurrency"] * (-(-job["longest"] // PAGE_SIZE) + 1),  # enough for all requests at once
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=job["concurrency"],
        allow_block_sharing=False,
    )
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)


if __name__ == "__main__":
    main("transformers", "transformers", run)
