"""What `chairlift bench stress` runs: small random models, random requests to them, and the check of greedy tokens."""

from __future__ import annotations

import importlib.util
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import Request
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter
from chairlift.models import build_model
from chairlift.text.tokenizer import Tokenizer
from chairlift_lab.common.model_shapes import SMALL_MODELS
from chairlift_lab.common.timing import in_inference_mode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.engine.startup import LoadedModel
    from chairlift.models.base import CausalLM

LONGEST_PROMPT, LONGEST_OUTPUT = 100, 40
LENGTHS = (1, 2, 5, 13, 30, 60, LONGEST_PROMPT)
KINDS = {"greedy": 12, "scored": 2, "drawn": 4, "several": 3, "beams": 2, "best of": 1, "penalised": 2, "structured": 3}
PATTERN = "[0-9]{2,4}-[a-f]{1,6}"


@dataclass(frozen=True, slots=True)
class StressRequest:
    kind: str
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]  # arguments of Engine.submit

    @property
    def is_greedy(self) -> bool:
        """Whether every token must be the argmax."""
        return self.kind in ("greedy", "scored") or (self.kind == "several" and self.params.temperature == 0)


class Traffic:
    """The same seed makes the same requests, as long as the answers are the same."""

    def __init__(self, seed: int, *, num_tokens: int) -> None:
        self.rng = random.Random(seed)
        self._num_tokens = num_tokens  # prompts hold tokens 0 to num_tokens - 1
        self._prefixes = [self._random(self.rng.randint(6, 50)) for _ in range(4)]
        self._earlier: deque[list[int]] = deque(maxlen=32)
        weights = dict(KINDS)
        if importlib.util.find_spec("llguidance") is None:
            del weights["structured"]
        self._kinds, self._weights = list(weights), list(weights.values())

    def request(self) -> StressRequest:
        rng = self.rng
        (kind,) = rng.choices(self._kinds, self._weights)
        options: dict[str, Any] = {"timeout": rng.uniform(0.001, 0.1)} if rng.random() < 0.03 else {}
        options |= {"cache_salt": "another"} if rng.random() < 0.1 else {}
        return StressRequest(kind, self._prompt(), self._params(kind), options)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep tokens that later prompts may quote."""
        self._earlier.append(list(tokens))

    def _random(self, count: int) -> list[int]:
        return [self.rng.randrange(self._num_tokens) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng, length = self.rng, self.rng.choice(LENGTHS)
        kind = rng.randrange(4)
        if kind == 0:
            beginning = rng.choice(self._prefixes)
        elif kind == 1 and self._earlier:
            beginning = rng.choice(self._earlier)
        elif kind == 2:
            beginning = self._random(rng.randint(1, 4)) * length
        else:
            beginning = []
        return (beginning[: rng.randint(0, LONGEST_PROMPT)] + self._random(length))[:LONGEST_PROMPT]

    def _params(self, kind: str) -> SamplingParams:
        rng = self.rng
        common: dict[str, Any] = {"max_tokens": rng.randint(1, LONGEST_OUTPUT), "ignore_eos": rng.random() < 0.7}
        drawn: dict[str, Any] = {
            "temperature": rng.uniform(0.3, 1.5),
            "top_k": rng.choice([0, 5, 40]),
            "top_p": rng.choice([1.0, 0.8]),
        }
        width = rng.randint(2, 3)
        match kind:
            case "greedy":
                return SamplingParams(temperature=0.0, detokenize=rng.random() < 0.5, **common)
            case "scored":
                return SamplingParams(temperature=0.0, logprobs=rng.randint(0, 5), **common)
            case "drawn":
                return SamplingParams(**drawn, seed=rng.randrange(1000), min_p=rng.choice([0.0, 0.05]), **common)
            case "several":
                drawn = drawn if rng.random() < 0.5 else {"temperature": 0.0}
                return SamplingParams(**drawn, n=rng.randint(2, 4), **common)
            case "beams":
                return SamplingParams(beam_width=width, n=rng.randint(1, width), max_tokens=common["max_tokens"])
            case "best of":
                return SamplingParams(temperature=0.9, best_of=3, n=rng.randint(1, 3), **common)
            case "penalised":
                return SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, **common)
            case _:
                return SamplingParams(temperature=0.0, structure=Structure.regex(PATTERN), max_tokens=30)


END = 256  # the token after those of the 256 bytes
SHAPE, FAMILIES = SMALL_MODELS["stress"], SMALL_MODELS["families"]  # The vocabulary is larger than the tokenizer's.


def stress_model(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str = "none",
    batch_invariant: bool = False,
) -> LoadedModel:
    import torch

    from chairlift.engine.startup import LoadedModel

    if family not in FAMILIES:
        raise InvalidParameter("family", f"unknown {family!r}; choose from {', '.join(FAMILIES)}")
    config = SHAPE | {"model_type": family} | FAMILIES[family]
    with torch.inference_mode():
        tensors = decisive_tensors(config, device)
        options: dict[str, Any] = {"quantization": quantization, "batch_invariant": batch_invariant}
        model = build_model(config, tensors, dtype=dtype, device=device, **options)
    return LoadedModel(f"a random {family}", model, byte_tokenizer(), frozenset({END}))


def decisive_tensors(config: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Weights scaled so that activations keep their size; default random weights hardly change their input."""
    from chairlift.models.dummy import SPREAD, dummy_tensors

    for name, values in dummy_tensors(config, device):
        yield name, values if values.dim() == 1 else values.float() * (1.2 * values.shape[-1] ** -0.5 / SPREAD)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one for the end."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


BLOCK = 16  # tokens of a block where tokens are checked


@in_inference_mode
def greedy_gaps(
    model: CausalLM, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], cache_dtype: torch.dtype | None = None
) -> Tensor:
    """For each output token of the (prompt, output) pairs: the gap between the highest score and its own.

    The gap is 0 where greedy decoding chooses the same token. Attention is the plain formula, one sequence at a time,
    over keys and values in `cache_dtype`, by default that of the model.
    """
    import torch

    from chairlift.attention.backends.bursted import BurstedAttention
    from chairlift.attention.batch import build_batch
    from chairlift.runner.memory import allocate_states, allocate_storage

    chunks: list[Chunk] = []
    rows: list[int] = []  # The next token of each is an output token.
    used = row = 0
    for index, (prompt, output) in enumerate(sequences):
        tokens = [*prompt, *output[:-1]]
        blocks = -(-len(tokens) // BLOCK)
        request = Request(f"{index}", tokens, SamplingParams(), max_new_tokens=1, arrival=0.0)
        chunks.append(Chunk(request, 0, len(tokens), range(used, used + blocks), samples=False))
        rows += range(row + len(prompt) - 1, row + len(tokens))
        used, row = used + blocks, row + len(tokens)
    storage = allocate_storage(model.attention_layers, used, BLOCK, cache_dtype or model.dtype, model.device)
    plan, states = StepPlan(0, tuple(chunks)), allocate_states(model.recurrent_layers, 1, model.device)
    batch = build_batch(plan, storage, model.device, states=states)
    hidden = model.hidden_states(batch, BurstedAttention().begin(batch, storage)).last
    scores = model.logits(hidden[torch.tensor(rows, device=model.device)]).double()
    chosen = torch.tensor([token for _, output in sequences for token in output], device=model.device)
    return (scores.max(dim=-1).values - scores.gather(-1, chosen[:, None])[:, 0]).cpu()
