"""Mixtures of experts: routing, grouping and products."""
