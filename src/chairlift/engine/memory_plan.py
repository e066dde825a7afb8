"""How much memory the weights take, and what the KV cache and the states of recurrent layers get beside them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.attention.interface import AttentionLayer
from chairlift.attention.placement import Placement
from chairlift.attention.recurrent import RecurrentLayer
from chairlift.attention.storage import stored_size
from chairlift.core.kv.kv_cache import KVCache
from chairlift.core.kv.state_slots import MIN_SLOTS
from chairlift.core.kv.windowed_cache import FULL, make_cache
from chairlift.core.plan import NO_LIMIT
from chairlift.engine.settings import LoadSettings
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.kernels.gpu import on_gpu
from chairlift.layers.formats import FORMATS
from chairlift.layers.formats.blocks import BlockWeight
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.gguf.blocks import GGUFWeight
from chairlift.models import format_obstacles, is_native
from chairlift.models.weight_sizes import weight_bytes
from chairlift.options import format_bytes, parse_bytes
from chairlift.runner.memory import free_memory
from chairlift.vision.model_images import vision_bytes

log = logging.getLogger("chairlift")

SMALLER_FORMATS = ("int8", "int4")  # They are suggested if they are smaller.
CPU = torch.device("cpu")
SHARE_OF_FREE_MEMORY, SHARE_OF_GPU_MEMORY = 0.25, 0.9
SHARE_OF_HOST_MEMORY = 0.25  # The blocks of preempted requests get this much.
SHORT_SEQUENCE = 64  # tokens, prompt and output: few requests have less
SHARE_OF_STATES = 0.5  # The states of recurrent layers get this much of the cache, at most.
SNAPSHOTS_PER_REQUEST = 3  # There is a use for those of a shared prefix, a prompt and an answer.


def expected_weight_bytes(checkpoint: Checkpoint, quantization: str, dtype: torch.dtype) -> int:
    """About the bytes of the weights in memory."""
    if quantization != "checkpoint":
        return weight_bytes(checkpoint.config, FORMATS.get(quantization), dtype, "cpu")
    if checkpoint.format != "gguf" or not is_native(checkpoint.config):
        return checkpoint.num_bytes
    total = 0
    for _, weight in checkpoint.stored():
        if isinstance(weight, GGUFWeight) and BlockWeight.accepts([weight], dtype, CPU):
            total += BlockWeight.bytes_of(weight)
        else:
            total += weight.shape.numel() * dtype.itemsize
    return total


def require_memory(checkpoint: Checkpoint, num_bytes: int, settings: LoadSettings) -> None:
    """State what loading takes; raise if the machine does not have it."""
    config, dtype = settings.config, settings.model_dtype
    kv_bytes = 0 if config.kv_memory is None else parse_bytes("kv_memory", config.kv_memory)
    for_images = vision_bytes(checkpoint.config, checkpoint.format, "cpu", config.images, dtype)
    num_bytes += for_images
    free, needed = free_memory(CPU), num_bytes + kv_bytes
    parts = f"{format_bytes(num_bytes)} of weights"
    if for_images:
        parts += f", {format_bytes(for_images)} of them to read images,"
    if kv_bytes:
        parts += f" + {format_bytes(kv_bytes)} of KV cache = {format_bytes(needed)}"
    if needed <= free:
        log.info(f"memory     {parts}, of {format_bytes(free)} that are free")
        return
    if num_bytes < free:
        left = f"the {format_bytes(free - num_bytes)} that are free beside {format_bytes(num_bytes)} of weights"
        raise InvalidParameter("kv_memory", f"{format_bytes(kv_bytes)} is more than {left}")
    smaller = [
        f"--quantization {name} ({format_bytes(size)})"
        for name in SMALLER_FORMATS
        if not format_obstacles(checkpoint.config, name, dtype, CPU)
        and (size := weight_bytes(checkpoint.config, FORMATS.get(name), dtype, "cpu")) < num_bytes
    ]
    ways_out = " or ".join(["a smaller model", *smaller])
    raise UnsupportedModel(
        f"{checkpoint.path}: too little memory: {parts}, but {format_bytes(free)} are free; choose {ways_out}"
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory that is left beside the weights becomes KV blocks."""

    weight_bytes: int
    bytes_per_token: int  # keys and values of one token in all layers
    block_size: int
    num_blocks: int
    max_model_len: int
    source: str  # the origin of the amount, in words
    bytes_per_state: int = 0  # the state of one sequence in all recurrent layers
    num_states: int = 0  # state slots
    placement: Placement | None = None  # None: a block is memory for all layers
    bytes_per_place: int = 0  # Keys and values of one token in the layers that share a block.
    step_tokens: int = NO_LIMIT  # the most tokens of a request that are planned and not computed

    @property
    def bytes_per_block(self) -> int:
        return (self.bytes_per_token if self.placement is None else self.bytes_per_place) * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """The tokens of as many sequences of the full length as fit."""
        if self.placement is None:
            return self.num_blocks * self.block_size
        return int(self.sequences(self.max_model_len) * self.max_model_len)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence that fits."""
        return self._accounting(self.step_tokens).room_behind(0) * self.block_size

    def sequences(self, length: int) -> float:
        """How many sequences of `length` tokens fit, of which one is computed and the others are decoding."""
        if self.placement is None:
            return self.num_blocks * self.block_size / length
        blocks = -(-length // self.block_size)
        most = self._accounting(self.step_tokens).most_held(0, blocks)
        return max(0.0, 1 + (self.num_blocks - most) / self._accounting(1).most_held(0, blocks))

    def _accounting(self, step_tokens: int) -> KVCache:
        return self.make_cache(step_tokens=step_tokens)

    def make_cache(self, *, prefix_caching: bool = True, step_tokens: int | None = None) -> KVCache:
        """The accounting of these blocks."""
        reaches = (FULL,) if self.placement is None else self.placement.reaches
        return make_cache(
            self.num_blocks,
            self.block_size,
            reaches=reaches,
            step_tokens=self.step_tokens if step_tokens is None else step_tokens,
            prefix_caching=prefix_caching,
        )

    def max_requests(self, most: int) -> int:
        """`most`, or fewer if there is not even memory for as many short sequences.

        How many really run depends on their lengths, and is decided when they are admitted.
        """
        if self.num_states:
            most = min(most, self.num_states - 1)  # one more is for a snapshot that is read
        return max(1, min(most, self.num_tokens // SHORT_SEQUENCE))

    @property
    def snapshot_interval(self) -> int:
        """Tokens between snapshots of a prompt, of which one takes as much memory as the tokens' keys and values."""
        return self.bytes_per_state // self.bytes_per_token if self.bytes_per_token else SHORT_SEQUENCE

    def lines(self) -> list[str]:
        """The arithmetic, for the start-up log."""
        sequences = self.sequences(self.max_model_len)
        per_token = f"{self.bytes_per_block // self.block_size:,} bytes per token"
        if self.placement is not None and self.placement.num_tables > 1:
            per_token += f" of {len(self.placement.shapes)} layers"
        return [
            f"weights    {format_bytes(self.weight_bytes)}",
            f"KV cache   {format_bytes(self.kv_bytes)} ({self.source})",
            f"           {per_token} x {self.block_size} tokens per block"
            f" = {format_bytes(self.bytes_per_block)} per block",
            *self._group_lines(),
            f"           {self.num_blocks:,} blocks = {self.num_tokens:,} tokens"
            f" = {sequences:.1f} sequences of the full {self.max_model_len:,} tokens",
            *self._state_lines(),
        ]

    def _group_lines(self) -> list[str]:
        return [f"           {self.describe_groups()}"] if self.placement is not None else []

    def describe_groups(self) -> str:
        """The layers of each group, and the block tables of a request, in words."""
        assert self.placement is not None
        counts = Counter(self.placement.reaches[table] for table in self.placement.tables)
        groups = [f"{count} layers with {reach.words}" for reach, count in counts.items()]
        tables = f", in {self.placement.num_tables} block tables" if self.placement.num_tables > 1 else ""
        return f"{' and '.join(groups)}{tables}"

    def _state_lines(self) -> list[str]:
        if not self.num_states:
            return []
        return [
            f"states     {format_bytes(self.num_states * self.bytes_per_state)} of recurrent layers, shared with the"
            " KV cache",
            f"           {format_bytes(self.bytes_per_state)} per sequence x {self.num_states:,} slots"
            " for running requests, draft tokens and snapshots",
        ]


def plan_memory(
    layers: Sequence[AttentionLayer],
    *,
    weight_bytes: int,
    kv_memory: int | str | None,
    memory_share: float | None = None,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    max_batch_requests: int,
    step_bytes: int = 0,
    adapter_bytes: int = 0,
    mapped_bytes: int = 0,
    recurrent: Sequence[RecurrentLayer] = (),
    state_memory: int | str | None = None,
    states_per_request: int = 1,
    free: int | None = None,
    placement: Placement | None = None,
    step_tokens: int = NO_LIMIT,
) -> MemoryPlan:
    """`kv_memory` as given, or a share of what is free beside steps and adapters, but no more than a full batch
    can use.

    The states of `recurrent` layers get `state_memory` of it, or as much as there is a use for, up to half or to what
    the KV cache has no use for. `mapped_bytes` of the weights are pages of a file, which the system counts as free.
    `states_per_request`: that there is a use for, with draft tokens and snapshots. `free`: bytes in place of those that
    are free here. `placement` of the layers in blocks, unless a block is memory for all of them; `step_tokens`: the
    most tokens of a request that are planned and not computed.
    """
    per_token = bytes_per_token(layers, dtype)
    if placement is not None and placement.num_tables == 1 and placement.reaches[0].is_full:
        placement = None
    per_place = per_token if placement is None else bytes_per_token(placement.shapes, dtype)
    per_block = per_place * block_size
    free = (free_memory(device, mapped=mapped_bytes) if free is None else free) - step_bytes - adapter_bytes
    if kv_memory is not None:
        budget, source = parse_bytes("kv_memory", kv_memory), "kv_memory"
        if budget > free:
            problem = f"{format_bytes(budget)} is more than the {format_bytes(max(0, free))} that are free beside"
            if step_bytes:
                way_out = f"{format_bytes(step_bytes)} for the largest step; lower it, or max_batch_tokens"
            else:
                way_out = f"{format_bytes(weight_bytes)} of weights; lower it"
            raise InvalidParameter("kv_memory", f"{problem} {way_out}")
    else:
        share = memory_share or (SHARE_OF_GPU_MEMORY if on_gpu(device) else SHARE_OF_FREE_MEMORY)
        beside = f" beside {format_bytes(step_bytes)} for the largest step" if step_bytes else ""
        budget, source = max(0, int(free * share)), f"{share:.0%} of free memory{beside}"
    per_request = -(-max_model_len // block_size)
    if placement is not None:
        endless = make_cache(NO_LIMIT, block_size, reaches=placement.reaches, step_tokens=step_tokens)
        per_request = endless.most_held(0, per_request)
    most = max_batch_requests * per_request
    per_state = sum(layer.num_bytes for layer in recurrent)
    num_states = 0
    if per_state and state_memory is not None:
        num_states = _given_states(parse_bytes("state_memory", state_memory), per_state, budget - per_block)
    elif per_state:
        num_states = _num_states(budget, per_state, most * per_block, 1 + max_batch_requests * states_per_request)
    num_blocks = (budget - num_states * per_state) // per_block if per_block else most
    if kv_memory is None and num_blocks > most:
        num_blocks, source = most, f"enough for all {max_batch_requests} requests of a batch"
    if num_blocks < 1:
        needed = f"one block of {block_size} tokens takes {format_bytes(per_block)}"
        raise InvalidParameter("kv_memory", f"{format_bytes(budget)} is too little: {needed}")
    plan = MemoryPlan(weight_bytes, per_token, block_size, num_blocks, max_model_len, source, per_state, num_states)
    return replace(plan, placement=placement, bytes_per_place=per_place, step_tokens=step_tokens)


def _num_states(budget: int, per_state: int, most_kv: int, wanted: int) -> int:
    """State slots in a budget that they share with the KV cache, which has a use for `most_kv` bytes."""
    room = max(int(budget * SHARE_OF_STATES), budget - most_kv) // per_state
    if room < MIN_SLOTS:
        needed = f"{MIN_SLOTS} states of {format_bytes(per_state)} must fit beside the KV cache"
        raise InvalidParameter("kv_memory", f"{format_bytes(budget)} is too little: {needed}")
    return max(MIN_SLOTS, min(room, wanted))


def _given_states(given: int, per_state: int, most: int) -> int:
    """State slots in a given amount, of at most `most` bytes."""
    if given > most:
        problem = f"{format_bytes(given)} leaves no block of the KV cache: both share {format_bytes(most)}"
        raise InvalidParameter("state_memory", f"{problem} (kv_memory)")
    if given < MIN_SLOTS * per_state:
        needed = f"{MIN_SLOTS} states of {format_bytes(per_state)} must fit"
        raise InvalidParameter("state_memory", f"{format_bytes(given)} is too little: {needed}")
    return given // per_state


def bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    return sum(
        layer.numbers_per_token // layer.head_dim * stored_size(layer.head_dim, dtype) * dtype.itemsize
        for layer in layers
    )


def plan_host_slots(swap_memory: int | str | None, plan: MemoryPlan) -> int:
    """Blocks that fit in `swap_memory`; by default as many as the KV cache has, in a quarter of the host's memory."""
    per_block, free = plan.bytes_per_block, free_memory(CPU)
    if swap_memory is None:
        slots = int(min(plan.kv_bytes, SHARE_OF_HOST_MEMORY * free)) // per_block
        if not slots:
            raise InvalidParameter("swap_memory", "the host has no free memory for a single block")
        return slots
    slots = parse_bytes("swap_memory", swap_memory) // per_block
    if slots * per_block > free:
        problem = f"{format_bytes(slots * per_block)} is more than the {format_bytes(free)} that are free on the host"
        raise InvalidParameter("swap_memory", f"{problem}; lower it")
    if not slots:
        raise InvalidParameter("swap_memory", f"is too little: one block takes {format_bytes(per_block)}")
    return slots
