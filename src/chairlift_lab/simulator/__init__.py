"""The engine's own scheduler on a virtual clock: what would happen, without a model."""
