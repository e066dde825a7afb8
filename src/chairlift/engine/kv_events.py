"""Publishes which blocks the prefix cache has, in the schema of vLLM's KV events, for gateways that route by it.

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and, in msgpack, a batch

    [time, [event, ...], data parallel rank]

whose events are ["BlockStored", hashes, parent hash, token ids, block size, None, "GPU", None],
["BlockRemoved", hashes, "GPU"] and ["AllBlocksCleared"]. A hash is the last 8 bytes of the block's digest as a number.
A subscriber that missed messages sends the first sequence number that it lacks to the replay address.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, Full, Queue
from typing import Any

import msgspec
import zmq

from chairlift.config import EngineConfig
from chairlift.core.events import Event
from chairlift.core.kv.prefix_index import IndexedBlock, IndexObserver
from chairlift.errors import InvalidParameter

log = logging.getLogger("chairlift")

RANK = 0  # Every engine is a publisher of its own.
MEDIUM = "GPU"  # what vLLM calls the memory of the device, whichever it is
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
QUEUED_BATCHES = 10_000
KEPT_BATCHES = 10_000  # Replays read them.
POLL_SECONDS = 0.05
CLOSE_SECONDS = 1.0

Message = tuple[int, bytes]
"""A sequence number and an encoded batch."""


def block_hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class KVEventPublisher:
    """Sends batches of events from a thread. A batch that finds the queue full is dropped: its number is left out."""

    def __init__(
        self, address: str, replay_address: str | None = None, topic: str = "", *, queued: int = QUEUED_BATCHES
    ) -> None:
        self.num_batches = 0  # published or dropped: the number of the next one
        self.num_dropped = 0
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._batches: Queue[Message] = Queue(queued)
        self._kept: deque[Message] = deque(maxlen=KEPT_BATCHES)
        self._closing = threading.Event()
        self._messages = self._open(zmq.PUB, "kv_events", address)
        self._replays: zmq.Socket[bytes] | None = None
        if replay_address is not None:
            self._replays = self._open(zmq.ROUTER, "kv_events_replay", replay_address)
        self._thread = threading.Thread(target=self._run, name="chairlift-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, parameter: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            if kind == zmq.ROUTER or _is_bound(address):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidParameter(parameter, f"{address!r} cannot be used: {error}") from None
        return socket

    def publish(self, events: Sequence[Sequence[Any]]) -> bool:
        """Queue a batch; False if it was dropped."""
        data = msgspec.msgpack.encode([time.time(), events, RANK])
        try:
            self._batches.put_nowait((self.num_batches, data))
        except Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning("KV events come faster than they can be sent: some are dropped")
            return False
        finally:
            self.num_batches += 1
        return True

    def _run(self) -> None:
        while not (self._closing.is_set() and self._batches.empty()):
            try:
                number, data = self._batches.get(timeout=POLL_SECONDS)
            except Empty:
                pass
            else:
                self._messages.send_multipart((self._topic, number.to_bytes(8, "big"), data))
                self._kept.append((number, data))
            while self._replays is not None and self._replays.poll(0):
                self._replay(self._replays)

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Send the kept batches from a number on, and an end; requests of another form have no answer."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, data in self._kept:
            if number >= int.from_bytes(first, "big"):
                socket.send_multipart((client, b"", number.to_bytes(8, "big"), data))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Send what is queued, for at most a second, and close the sockets."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self.num_dropped:
            log.warning(f"{self.num_dropped:,} batches of KV events were dropped")
        if not self._thread.is_alive():
            self._context.destroy(linger=int(1000 * CLOSE_SECONDS))


def _is_bound(address: str) -> bool:
    """Whether the address is ours, and not that of a subscriber that waits for connections: as in vLLM."""
    return "*" in address or "::" in address or address.startswith("ipc://")


class KVEvents(IndexObserver):
    """Collects what happens to the prefix index during a step, and publishes it at the end of the step."""

    def __init__(self, publisher: KVEventPublisher, block_size: int) -> None:
        self.publisher = publisher
        self._block_size = block_size
        self._published: set[int] = set()  # the hashes that subscribers know
        self._events: list[list[Any]] = []
        self._clear()  # A subscriber may remember the blocks of a process that had this address before.

    def _clear(self) -> None:
        self._published.clear()
        self._events = [["AllBlocksCleared"]]

    def stored(self, block: IndexedBlock) -> None:
        own, parent = block_hash(block.digest), None if block.parent is None else block_hash(block.parent)
        self._published.add(own)
        last: list[Any] = self._events[-1] if self._events else [None]
        if last[0] == "BlockStored" and last[1][-1] == parent:
            last[1].append(own)
            last[3].extend(block.tokens)
        else:
            self._events.append(
                ["BlockStored", [own], parent, list(block.tokens), self._block_size, None, MEDIUM, None]
            )

    def removed(self, digest: bytes) -> None:
        own = block_hash(digest)
        if own not in self._published:
            return
        self._published.remove(own)
        if self._events and self._events[-1][0] == "BlockRemoved":
            self._events[-1][1].append(own)
        else:
            self._events.append(["BlockRemoved", [own], MEDIUM])

    def flush(self, _: Sequence[Event] = ()) -> None:
        """Publish what has happened since the last call."""
        if self._events:
            events, self._events = self._events, []
            if not self.publisher.publish(events):
                self._clear()  # Subscribers have not heard of some blocks, and of some that are gone.

    def close(self) -> None:
        self.flush()
        self.publisher.close()


def make_kv_events(config: EngineConfig) -> KVEvents:
    """Open the addresses of a config that has some."""
    assert config.kv_events is not None
    publisher = KVEventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic)
    return KVEvents(publisher, config.block_size)
