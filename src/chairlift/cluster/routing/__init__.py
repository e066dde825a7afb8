"""Chooses the replica of each request; the simulator and the cluster run the same code."""
