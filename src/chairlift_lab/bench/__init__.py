"""Benchmarks: one folder each."""
