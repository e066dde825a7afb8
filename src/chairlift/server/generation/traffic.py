"""What the access log says about a request so that it can be simulated again: lengths, times, and hashes of blocks.

A prompt is cut into blocks of `BLOCK_TOKENS` tokens. The hash of a block depends on all tokens before it, on the
request's cache salt, and on a key that the server draws at its start. So equal hashes mean equal beginnings that may
share a cache, nothing can be read from them without the key, and those of two servers have nothing in common unless
both were given the same key.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from chairlift.core.events import completion_ids
from chairlift.core.targets import NAMES, Targets
from chairlift.server.generation.usage import Timeline
from chairlift.server.wire.messages import Submit

BLOCK_TOKENS = 16
HASH_BYTES = 6  # With a million blocks, two different ones have the same hash once in 500 logs.


def block_hashes(tokens: Sequence[int], cache_salt: str, key: str) -> Iterator[str]:
    """The hashes of the blocks that a prompt fills."""
    secret = blake2b(key.encode("utf-8", "surrogatepass")).digest()
    parent = blake2b(cache_salt.encode("utf-8", "surrogatepass"), key=secret, digest_size=HASH_BYTES).digest()
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block = array("q", tokens[end - BLOCK_TOKENS : end]).tobytes()
        parent = blake2b(parent + block, key=secret, digest_size=HASH_BYTES).digest()
        yield parent.hex()


@dataclass(slots=True)
class Traffic:
    """The prompts of one request, as they were submitted to the engine."""

    key: str
    prompts: list[dict[str, Any]] = field(default_factory=list)
    _prompt_of: dict[str, int] = field(default_factory=dict)  # the place of the prompt of each completion, by its id
    _priority: int = 0
    _targets: Targets | None = None
    _class: str = ""

    def add(self, messages: Sequence[Submit]) -> None:
        for message in messages:
            hashes = block_hashes(message.prompt, message.cache_salt, self.key)
            for completion in completion_ids(message.request_id, message.params.n):
                self._prompt_of[completion] = len(self.prompts)
            self.prompts.append({"tokens": len(message.prompt), "blocks": list(hashes)})
            self._priority, self._targets = message.priority, message.targets
            self._class = message.service_class

    def facts(self, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
        """The fields of the access log; none if nothing was submitted."""
        if self._targets is None:
            return {}
        completions = [_completion(prompt, timelines.get(name)) for name, prompt in self._prompt_of.items()]
        targets = {f"{name}_ms": 1e3 * limit for name in NAMES if (limit := getattr(self._targets, name)) is not None}
        return {
            "priority": self._priority,
            "class": self._class or None,
            "targets": targets or None,
            "block_tokens": BLOCK_TOKENS,
            "prompts": self.prompts,
            "completions": completions,
        }


def _completion(prompt: int, times: Timeline | None) -> dict[str, Any]:
    """The tokens and times of a completion; the times that it did not reach are null."""
    if times is None:
        return {"prompt": prompt, "tokens": 0}
    ended = times.last_token if times.first_token is not None else None
    moments = {"queue_ms": times.admitted, "ttft_ms": times.first_token, "e2e_ms": ended}
    since = {
        name: None if moment is None else round(1e3 * max(0.0, moment - times.arrived), 3)
        for name, moment in moments.items()
    }
    facts = {"prompt": prompt, "tokens": times.num_tokens, "cached": times.cached_tokens}
    return facts | since | {"finish_reason": times.finish_reason}
