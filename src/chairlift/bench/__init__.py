"""Measuring the engine, alone and against others, on workloads that can be repeated."""
