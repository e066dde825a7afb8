"""Batching policies: when waiting requests are admitted."""
