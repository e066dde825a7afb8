"""Evictions: which cached block, snapshot or part of a tier is given up first."""
