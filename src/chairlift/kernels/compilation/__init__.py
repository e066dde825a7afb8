"""Finds out which kernels a step launches and compiles them in processes beside the engine."""
