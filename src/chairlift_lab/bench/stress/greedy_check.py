"""Check greedy tokens by one pass over whole sequences, without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.attention.backends.bursted import BurstedAttention
from chairlift.attention.batch import build_batch
from chairlift.attention.storage import KVStorage
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.models.base import CausalLM
from chairlift.runner.state_storage import allocate_states, with_states

BLOCK_SIZE = 16


@torch.inference_mode()
def greedy_gaps(
    model: CausalLM, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], cache_dtype: torch.dtype | None = None
) -> Tensor:
    """For each output token of the (prompt, output) pairs: the gap between the highest score and its own.

    The gap is 0 where greedy decoding chooses the same token. Attention is the plain formula, one sequence at a time,
    over keys and values in `cache_dtype`, by default that of the model.
    """
    chunks: list[Chunk] = []
    rows: list[int] = []  # whose next token is an output token
    used = row = 0
    for index, (prompt, output) in enumerate(sequences):
        tokens = [*prompt, *output[:-1]]
        blocks = -(-len(tokens) // BLOCK_SIZE)
        request = Request(f"{index}", tokens, SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunks.append(Chunk(request, 0, len(tokens), range(used, used + blocks), samples=False))
        rows += range(row + len(prompt) - 1, row + len(tokens))
        used, row = used + blocks, row + len(tokens)
    storage = _storage(model, used + 1, cache_dtype or model.dtype)
    plan, states = StepPlan(0, tuple(chunks)), allocate_states(model.recurrent_layers, 1, model.device)
    batch = with_states(build_batch(plan, storage, model.device), plan, states)
    hidden = model.hidden_states(batch, BurstedAttention().begin(batch, storage)).last
    scores = model.logits(hidden[torch.tensor(rows, device=model.device)]).double()
    chosen = torch.tensor([token for _, output in sequences for token in output], device=model.device)
    return (scores.max(dim=-1).values - scores.gather(-1, chosen[:, None])[:, 0]).cpu()


def _storage(model: CausalLM, blocks: int, dtype: torch.dtype) -> KVStorage:
    def side() -> list[Tensor]:
        return [
            torch.zeros(blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=model.device)
            for layer in model.attention_layers
        ]

    return KVStorage(side(), side())
