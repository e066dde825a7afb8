"""Workloads, engines, timing and floors that several benches share."""
