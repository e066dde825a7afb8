"""Kernels around the passes of draft networks: the hidden states that a head reads, and the inputs of a pass."""
