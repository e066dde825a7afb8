"""Routing policies, one module each, found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.registry import Registry

if TYPE_CHECKING:
    from chairlift.cluster.routing.policies.base import RoutingPolicy

ROUTERS: Registry[type[RoutingPolicy]] = Registry("router", __name__)
