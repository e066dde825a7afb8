"""The part of a request that a router reads."""

from __future__ import annotations

from typing import NamedTuple

from chairlift.cluster.routing.prefix_keys import PrefixKey


class RoutedRequest(NamedTuple):
    num_prompt: int
    max_output: int | None = None  # the request's own limit, if it has one
    keys: tuple[PrefixKey, ...] = ()  # of its prompt's prefixes, shortest first; only if the policy reads them
