"""Attention over a ragged batch and a paged KV cache: the interface to models, and the backends behind it."""
