"""Random traffic with a KV cache that is too small, all invariants checked at every step, and all greedy tokens after.

Requests of every kind arrive, are cancelled, time out, share prefixes and are preempted. No block may be lost or
counted twice, every request finishes exactly once, and every greedy token is the argmax of the model for that
sequence alone.
"""

from __future__ import annotations

import importlib.util
import math
import random
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.config import EngineConfig
from chairlift.core.events import (
    DraftsVerified,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenProduced,
)
from chairlift.core.integrity import check_accounting, check_plan, check_quiescent, check_shared_prefixes
from chairlift.core.plan import Chunk, StepPlan
from chairlift.core.request import FinishReason, Request, completion_ids
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.models import build_model
from chairlift.options import option_of
from chairlift.progress import Note
from chairlift.terminal.tables import Column, Table
from chairlift.text.tokenizer import Tokenizer
from chairlift_lab.bench.base import BenchResult, bench
from chairlift_lab.common.timing import in_inference_mode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chairlift.attention.storage import KVStorage
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
            begun = rng.choice(self._prefixes)
        elif kind == 1 and self._earlier:
            begun = rng.choice(self._earlier)
        elif kind == 2:
            begun = self._random(rng.randint(1, 4)) * length
        else:
            begun = []
        return (begun[: rng.randint(0, LONGEST_PROMPT)] + self._random(length))[:LONGEST_PROMPT]

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
SHAPE: dict[str, Any] = {
    "vocab_size": 272,  # more than the tokenizer has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
}


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


BLOCK_SIZE = 16


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
    from chairlift.runner.memory import allocate_states

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
    batch = build_batch(plan, storage, model.device, states=states)
    hidden = model.hidden_states(batch, BurstedAttention().begin(batch, storage)).last
    scores = model.logits(hidden[torch.tensor(rows, device=model.device)]).double()
    chosen = torch.tensor([token for _, output in sequences for token in output], device=model.device)
    return (scores.max(dim=-1).values - scores.gather(-1, chosen[:, None])[:, 0]).cpu()


def _storage(model: CausalLM, blocks: int, dtype: torch.dtype) -> KVStorage:
    import torch

    from chairlift.attention.storage import KVStorage

    def side() -> list[Tensor]:
        return [
            torch.zeros(blocks, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=model.device)
            for layer in model.attention_layers
        ]

    return KVStorage(side(), side())


BLOCK_SIZE, NUM_BLOCKS, HOST_BLOCKS, MAX_REQUESTS = 4, 64, 32, 12
MOST_OPEN = 30
# Scores closer than this may swap ranks, depending on the order of sums and on rounding.
TIES = {"float32": 1e-4, "float16": 0.06, "bfloat16": 0.5}  # The keys are types of the model.
# Whether a step rounds its activations to 8 bits depends on its rows. Rounding all of them in float32 put the chosen
# token up to 0.8 below the best in 3,600 cases (scores have a standard deviation of 1.2, and the best are about 3.5).
TIE_OF_8_BITS = 2.0
# In float32 quantized weights round all activations to 8 bits; sums in another order may round one of them to the next
# level, which put the chosen token up to 0.033 below the best in 391 steps.
TIE_OF_ROUNDED_FLOAT32 = 0.25
# A cache in 8-bit floats turns a last bit that differs into 6% of a key: in bfloat16 beside float32 that put the chosen
# token up to 0.54 below the best in 32,000 cases (0.12 with a cache in bfloat16).
TIE_OF_8_BIT_CACHE = 1.5
CHECKED_AT_ONCE = 64


class StressFailed(ChairliftError):
    """The engine did something wrong."""


@dataclass(slots=True)
class StressFigures:
    """Counts of one round without a violation."""

    name: str
    seconds: float = 0.0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    swapped: int = 0  # preempted to host memory
    cached_tokens: int = 0  # Prompt tokens found as shared prefixes.
    drafts: int = 0
    accepted: int = 0
    checked: int = 0  # greedy tokens found correct
    ties: int = 0  # correct only within rounding

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"kinds": dict(self.kinds), "endings": dict(self.endings)}


def stress_config(loaded: LoadedModel, preemption: str, **options: Any) -> EngineConfig:
    from chairlift.engine.memory_plan import bytes_per_token

    per_block = BLOCK_SIZE * bytes_per_token(loaded.model.attention_layers, loaded.model.dtype)
    return EngineConfig(
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        quantization=loaded.model.quantization,
        block_size=BLOCK_SIZE,
        kv_memory=NUM_BLOCKS * per_block,
        max_model_len=LONGEST_PROMPT + LONGEST_OUTPUT,
        max_batch_requests=MAX_REQUESTS,
        max_batch_tokens=64,
        preemption=preemption,
        swap_memory=None if preemption == "recompute" else HOST_BLOCKS * per_block,
        **options,
    )


def stress(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    seconds: float = math.inf,
    steps: float = math.inf,
    seed: int = 0,
    note: Note = lambda text: None,
) -> StressFigures:
    """Run traffic for `seconds` or `steps`, whichever ends first, then until all requests have finished."""
    if not __debug__:
        raise StressFailed("run python without -O: the checks are assertions")
    run = _Stress(loaded, config, seed)
    try:
        run.to_end(seconds, steps, note)
    except (AssertionError, ChairliftError) as error:
        where = f"{config.preemption}, seed {seed}, after {run.figures.steps} steps"
        raise StressFailed(f"stress failed ({where}): {error}") from error
    return run.figures


@dataclass(slots=True)
class _Open:
    request: StressRequest
    tokens: list[int]
    reported: bool  # beams and completions that were not chosen report only their end


class _Stress:
    def __init__(self, loaded: LoadedModel, config: EngineConfig, seed: int) -> None:
        from chairlift.engine.settings import kv_dtype
        from chairlift.engine.startup import start_engine

        self.figures = StressFigures(config.preemption)
        self._model = loaded.model
        self._cache_dtype = kv_dtype(config, loaded.model)
        self._tie = _tie(loaded.model.quantization, loaded.model.dtype, self._cache_dtype)
        self._tokenizer = loaded.tokenizer
        self._engine = start_engine(loaded, config).engine
        check_every_plan(self._engine.scheduler)
        self._traffic = Traffic(seed, num_tokens=END)
        self._rng = self._traffic.rng
        self._open: dict[str, _Open] = {}
        self._unchecked: list[tuple[list[int], list[int]]] = []
        self._rate = 0.0  # arrivals per step
        self._rate_until = 0  # The step at which the rate changes.

    def to_end(self, seconds: float, steps: float, note: Note) -> None:
        begun = time.perf_counter()
        while self.figures.steps < steps and time.perf_counter() - begun < seconds:
            self._arrive()
            self._abort()
            self._step()
            if self.figures.steps % 100 == 0:
                note(f"{self.figures.name}: {self.figures.steps:,} steps, {self.figures.requests:,} requests")
        self._engine.expect_no_more()
        while self._engine.has_work:
            self._step()
        assert not self._open, f"requests without an ending: {list(self._open)[:5]}"
        check_quiescent(self._engine.scheduler)
        self._check_tokens()
        self._engine.shut_down()
        self.figures.seconds = time.perf_counter() - begun

    def _arrive(self) -> None:
        """Submit requests at a rate that changes between none and bursts."""
        if self.figures.steps >= self._rate_until:
            self._rate = self._rng.choice((0.0, 0.2, 0.7, 4.0))
            self._rate_until = self.figures.steps + self._rng.randint(20, 200)
        count = int(self._rate + self._rng.random())
        for _ in range(min(count, MOST_OPEN - len(self._open))):
            request = self._traffic.request()
            self.figures.requests += 1
            self.figures.kinds[request.kind] += 1
            reported = self._engine.submit(request.prompt, request.params, **request.options)
            for request_id in completion_ids(reported[0], request.params.num_sequences):
                assert request_id not in self._open, f"{request_id} was handed out twice"
                self._open[request_id] = _Open(request, [], reported=request_id in reported)

    def _abort(self) -> None:
        if self._open and self._rng.random() < 0.03:
            self._engine.cancel(self._rng.choice(list(self._open)))

    def _step(self) -> None:
        events = self._engine.step()
        self._engine.check_alive()
        self.figures.steps += 1
        check_accounting(self._engine.scheduler)
        check_shared_prefixes(self._engine.scheduler)
        for event in events:
            self._count(event)
        if len(self._unchecked) >= CHECKED_AT_ONCE:
            self._check_tokens()

    def _count(self, event: Event) -> None:
        figures = self.figures
        match event:
            case TokenProduced():
                assert event.request_id in self._open, f"{event.request_id} got a token after its end"
                one = self._open[event.request_id]
                assert one.reported, f"{event.request_id} got a token, but was not chosen"
                one.tokens.append(event.token)
                figures.tokens += 1
            case RequestFinished():
                assert event.request_id in self._open, f"{event.request_id} ended twice"
                self._end(self._open.pop(event.request_id), event)
            case RequestPreempted():
                figures.preempted += 1
                figures.swapped += event.swapped
            case RequestAdmitted():
                figures.cached_tokens += event.cached_tokens
            case DraftsVerified():
                figures.drafts += event.proposed
                figures.accepted += event.accepted
            case _:
                pass

    def _end(self, one: _Open, event: RequestFinished) -> None:
        reason, request, tokens = event.ending.reason, one.request, one.tokens
        assert reason is not FinishReason.ERROR, f"{event.request_id} ({request.kind}): {event.ending.detail}"
        self.figures.endings[reason.value] += 1
        if not one.reported:
            return
        if reason is FinishReason.LENGTH:
            assert len(tokens) == request.params.max_tokens, f"{event.request_id} has {len(tokens)} tokens"
        if request.kind == "structured" and reason is FinishReason.STOP:
            text = self._tokenizer.decode(tokens)
            assert re.fullmatch(PATTERN, text), f"{event.request_id} breaks its grammar: {text!r}"
        if request.is_greedy and tokens:
            self._unchecked.append((request.prompt, tokens))
        self._traffic.remember([*request.prompt, *tokens])

    def _check_tokens(self) -> None:
        """Check the tokens of finished requests, cancelled ones included."""
        if not self._unchecked:
            return
        gaps = greedy_gaps(self._model, self._unchecked, self._cache_dtype)
        worst = float(gaps.max())
        assert worst <= self._tie, f"a token whose score is {worst:.3g} below the best: {self._with_gap(gaps.tolist())}"
        self.figures.checked += len(gaps)
        self.figures.ties += int((gaps > 0).sum())
        self._unchecked.clear()

    def _with_gap(self, gaps: Sequence[float]) -> str:
        at = 0
        for prompt, output in self._unchecked:
            for place, gap in enumerate(gaps[at : at + len(output)]):
                if gap > self._tie:
                    return f"the {place + 1}. of {output} after {prompt}"
            at += len(output)
        raise AssertionError("no gap is too large")


def _tie(quantization: str, dtype: torch.dtype, cache: torch.dtype) -> float:
    import torch

    if quantization == "fp8":
        return TIE_OF_8_BITS
    if cache is torch.float8_e4m3fn:
        return TIE_OF_8_BIT_CACHE
    rounds_float32 = quantization != "none" and dtype is torch.float32
    return TIE_OF_ROUNDED_FLOAT32 if rounds_float32 else TIES[str(dtype).removeprefix("torch.")]


def check_every_plan(scheduler: Scheduler) -> None:
    """Check each plan of the scheduler from now on, before it is run."""
    schedule = scheduler.schedule

    def checked(now: float) -> StepPlan:
        plan = schedule(now)
        check_accounting(scheduler)
        if plan:
            check_plan(scheduler, plan)
        return plan

    scheduler.schedule = checked  # type: ignore[method-assign]


FIGURES = (
    *("seconds", "steps", "requests", "tokens", "preempted", "swapped", "cached_tokens"),
    *("drafts", "accepted", "checked", "ties"),
)
COLUMNS = (
    Column("Round", "name"),
    *(Column(name.replace("_", " ").capitalize(), name, ",.0f") for name in FIGURES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StressEngineOptions:
    """The engine's options that stress can vary."""

    device: str = option_of(EngineConfig, "device")
    dtype: str = option_of(EngineConfig, "dtype", default="float32")
    quantization: str = option_of(EngineConfig, "quantization", default="none")
    kv_dtype: str = option_of(EngineConfig, "kv_dtype")
    speculate: str | None = option_of(EngineConfig, "speculate")
    draft_length: int | None = option_of(EngineConfig, "draft_length")
    attention: str = option_of(EngineConfig, "attention")
    batch_invariant: bool = option_of(EngineConfig, "batch_invariant")
    cuda_graphs: bool = option_of(EngineConfig, "cuda_graphs")


@bench(
    "stress",
    "chairlift bench stress --seconds 10",
    "chairlift bench stress --device cuda --seconds 180 --speculate ngram --json result.json",
    "chairlift bench stress --family qwen3_moe --batch-invariant",
    "chairlift bench stress --device cuda --dtype bfloat16 --quantization fp8 --kv-dtype fp8",
)
def bench_stress(
    note: Note,
    chosen: StressEngineOptions,
    seconds: Annotated[float, typer.Option(help="Duration of all rounds together.")] = 20.0,
    family: Annotated[str, typer.Option(help="llama, mistral, qwen3, qwen3_moe or gemma2.")] = "llama",
    preemption: Annotated[str, typer.Option(help="Preemption modes, a round with each.")] = "recompute,swap",
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
) -> BenchResult:
    """Random traffic with every invariant checked at every step; fails with the first violation.

    A small random model serves requests of every kind (greedy, sampled,
    parallel, beam search, structured, …) that come in bursts, quote each other,
    are cancelled or time out, with a KV cache that is far too small. The block
    accounting is checked after every step, every request must finish exactly
    once, and every token of a greedy request must be the argmax of the model on
    that sequence alone with plain attention (or tie with it within the rounding
    of --dtype).
    """
    from chairlift.engine.settings import resolve_machine

    if seconds <= 0:
        raise InvalidParameter("seconds", f"must be above 0, got {seconds}")
    if chosen.quantization not in ("none", "int4", "fp8"):
        raise InvalidParameter("quantization", f"must be none, int4 or fp8, got {chosen.quantization!r}")
    if chosen.quantization == "fp8" and family == "qwen3_moe":
        raise InvalidParameter(
            "family", "rounded activations may choose other experts, so that tokens cannot be checked"
        )
    rounds = [name.strip() for name in preemption.split(",")]
    options = asdict(chosen) | {"seed": seed}
    machine = resolve_machine(EngineConfig(device=options.pop("device"), dtype=options.pop("dtype")))
    quantization = options.pop("quantization")
    where = machine.device, machine.dtype
    loaded = stress_model(family, *where, quantization=quantization, batch_invariant=chosen.batch_invariant)
    configs = [stress_config(loaded, name, **options) for name in rounds]
    rows = [
        stress(loaded, config, seconds=seconds / len(rounds), seed=seed + number, note=note).row()
        for number, config in enumerate(configs)
    ]
    title = f"A random {family} under random traffic: all checks passed"
    request = {"family": family, "device": str(loaded.model.device), "dtype": chosen.dtype, "seconds": seconds}
    request |= options | {"quantization": quantization}
    return BenchResult(request, rows, [Table(title, COLUMNS, rows, _counts(rows))])


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"{row['name']}: {', '.join(f'{count:,} {name}' for name, count in row[key].items())}"
        for row in rows
        for key in ("kinds", "endings")
    )
