"""KV events: a subscriber that knows only vLLM's schema rebuilds the prefix index."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from chairlift.config import EngineConfig
from chairlift.core.kv.prefix_index import IndexedBlock, PrefixIndex
from chairlift.core.sampling.params import SamplingParams
from chairlift.engine.engine import Engine
from chairlift.engine.kv_events import END_OF_REPLAY, KVEventPublisher, KVEvents, block_hash
from chairlift.engine.startup import load_engine
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint

BLOCK_SIZE = 4
TIMEOUT_MS = 30_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Follows the messages, and asks for those that it missed."""

    def __init__(self, address: str, replay_address: str) -> None:
        self.context = zmq.Context()
        self.messages, self.replays = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket, place in ((self.messages, address), (self.replays, replay_address)):
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
            socket.connect(place)
        self.messages.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next = self.num_removed = self.num_replayed = 0

    def follow(self, end: int) -> None:
        """Read until the message before number `end`."""
        while self.next < end:
            topic, number, data = self.messages.recv_multipart()
            assert topic == b"kv@pod@tiny"
            if int.from_bytes(number, "big") > self.next:
                self.replay()
            self.apply(number, data)

    def replay(self) -> None:
        self.replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, number, data = self.replays.recv_multipart()
            if number == END_OF_REPLAY:
                return
            self.num_replayed += 1
            self.apply(number, data)

    def apply(self, number: bytes, data: bytes) -> None:
        if int.from_bytes(number, "big") < self.next:
            return  # It came with a replay.
        self.next = int.from_bytes(number, "big") + 1
        batch = msgspec.msgpack.decode(data, type=KVEventBatch)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved():
                    self.num_removed += len(event.block_hashes)
                    for each in event.block_hashes:
                        del self.blocks[each]
                case BlockStored():
                    self.store(event)

    def store(self, event: BlockStored) -> None:
        assert (event.block_size, event.medium) == (BLOCK_SIZE, "GPU")
        assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
        parent = event.parent_block_hash
        for place, each in enumerate(event.block_hashes):
            assert each not in self.blocks
            tokens = event.token_ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
            self.blocks[each] = (parent, tuple(tokens))
            parent = each

    def close(self) -> None:
        self.context.destroy(linger=0)


def contents(index: PrefixIndex) -> dict[int, tuple[int, ...]]:
    return {block_hash(index.digest_of(block)): tuple(index.prefix_of(block)[1]) for block in index.blocks()}


def run(engine: Engine, prompts: list[list[int]], **options: Any) -> None:
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False), **options)
        while engine.has_work:
            engine.step()


def config(**options: Any) -> EngineConfig:
    room = 24 * BLOCK_SIZE * 512
    base: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32", "quantization": "none"}
    return EngineConfig(**(base | {"block_size": BLOCK_SIZE, "kv_memory": room, "max_model_len": 48} | options))


def test_a_subscriber_rebuilds_the_index(tmp_path: Path) -> None:
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    options = config(kv_events=address, kv_events_replay=replay, kv_events_topic="kv@pod@tiny")
    engine = load_engine(str(write_tiny_checkpoint(tmp_path / "tiny")), options, progress=False).engine
    source, index, events = random.Random(1), engine.scheduler.kv.index, engine.kv_events
    assert events is not None
    common = [source.randrange(3, 200) for _ in range(10)]
    prompts = [common + [source.randrange(3, 200) for _ in range(source.randrange(1, 20))] for _ in range(10)]
    run(engine, prompts[:2])  # before the subscriber comes
    subscriber = Subscriber(address, replay)
    try:
        while not subscriber.messages.poll(20):  # until it is connected
            run(engine, [[source.randrange(3, 200) for _ in range(8)]])
        for prompt in prompts[2:]:
            run(engine, [prompt])
            subscriber.follow(events.publisher.num_batches)
            assert {each: tokens for each, (_, tokens) in subscriber.blocks.items()} == contents(index)
            assert {parent for parent, _ in subscriber.blocks.values()} - {None} <= set(subscriber.blocks)
        assert subscriber.num_removed > 0
        assert subscriber.num_replayed > 0
        before = contents(index)
        run(engine, [[3] * 20], cache_salt="secret")
        run(engine, [common])
        subscriber.follow(events.publisher.num_batches)
        assert set(contents(index)) - set(subscriber.blocks), "blocks with a salt are not published"
        assert set(subscriber.blocks) <= set(before) | set(contents(index))
    finally:
        subscriber.close()
        engine.shut_down()
    assert events.publisher.num_dropped == 0


def test_a_dropped_batch_makes_subscribers_forget(tmp_path: Path) -> None:
    """They would otherwise believe in blocks that are gone."""

    class Full:
        def __init__(self) -> None:
            self.batches: list[Any] = []
            self.is_full = False

        def publish(self, events: Any) -> bool:
            if not self.is_full:
                self.batches.append(events)
            return not self.is_full

    publisher = Full()
    events = KVEvents(publisher, 2)  # type: ignore[arg-type]
    first, second = (bytes([number]) * 32 for number in (1, 2))
    events.stored(IndexedBlock(first, None, (1, 2)))
    events.flush()
    publisher.is_full = True
    events.removed(first)
    events.flush()
    publisher.is_full = False
    events.removed(first)
    events.stored(IndexedBlock(second, None, (3, 4)))
    events.flush()
    stored = [
        ["BlockStored", [block_hash(each)], None, tokens, 2, None, "GPU", None]
        for each, tokens in ((first, [1, 2]), (second, [3, 4]))
    ]
    assert publisher.batches == [[["AllBlocksCleared"], stored[0]], [["AllBlocksCleared"], stored[1]]]


def test_a_queue_that_is_full_counts_what_it_drops(tmp_path: Path) -> None:
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", queued=1)
    publisher.close()  # Nothing is taken from the queue any more.
    assert [publisher.publish([["AllBlocksCleared"]]) for _ in range(3)] == [True, False, False]
    assert (publisher.num_batches, publisher.num_dropped) == (3, 2)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"kv_events": "5557"}, "kv_events"),
        ({"kv_events": "tcp://*"}, "kv_events"),
        ({"kv_events": "tcp://*:5557", "prefix_caching": False}, "kv_events"),
        ({"kv_events_replay": "tcp://*:5558"}, "kv_events_replay"),
        ({"kv_events_topic": "kv"}, "kv_events_topic"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        config(**options)
    assert error.value.parameter == parameter


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://*")
        with pytest.raises(InvalidParameter, match="cannot be used"):
            KVEventPublisher(f"tcp://*:{port}")


def test_without_an_address_nothing_observes_the_index(tmp_path: Path) -> None:
    engine = load_engine(str(write_tiny_checkpoint(tmp_path / "tiny")), config(), progress=False).engine
    assert engine.kv_events is None
    assert engine.scheduler.kv.index.observer is None
