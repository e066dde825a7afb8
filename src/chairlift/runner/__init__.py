"""Executors: from a step plan to sampled tokens, on a CPU or a GPU."""
