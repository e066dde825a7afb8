"""Chairlift: an LLM inference engine built around continuous batching."""

from __future__ import annotations

__version__ = "0.1.0"
